import json
import tarfile

import numpy as np
import pytest
import webdataset

from lomdm_dist.config import ModelConfig
from lomdm_dist.data import shards as shards_module
from lomdm_dist.data.shards import Manifest, ShardSet, ShardWriter, check_model_fits, read_manifest
from lomdm_dist.data.store import Access
from lomdm_dist.errors import UserError
from tests.data.made import FACTS, TOKENIZER, small_members

LENGTH = 6
ROWS = np.random.default_rng(0).integers(0, 69_990, (23, LENGTH))
FACTS = FACTS | {"tokens": ROWS.size}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Shards of 12, 8 and 3 sequences in members of 4, so that every boundary is crossed."""
    small_members(monkeypatch, 4)
    writer = ShardWriter(tmp_path / "shards", LENGTH, 70_000)
    for part in np.split(ROWS, [12, 20]):
        writer._write(part.astype(writer.dtype))
    writer.close(**FACTS)
    return tmp_path / "shards"


def edit(folder, change=lambda manifest: None, **values) -> None:
    """Change a manifest and sign it anew: another writer's, not a damaged one."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | values
    change(manifest)
    manifest["sha256"] = ""
    try:
        Manifest.model_validate(manifest).write(folder)
    except ValueError:
        path.write_text(json.dumps(manifest))


def test_any_row_in_any_order(folder):
    shards = ShardSet(folder)
    assert len(shards) == 23 and len(shards.manifest.shards) == 3
    indices = np.random.default_rng(1).permutation(23)
    assert np.array_equal(shards.rows(indices), ROWS[indices])
    assert shards.rows(np.array([], dtype=int)).shape == (0, LENGTH)


def test_the_plain_webdataset_library_reads_them(folder):
    tars = sorted(str(path) for path in folder.glob("*.tar"))
    stream = webdataset.WebDataset(tars, shardshuffle=False).decode()
    blocks = [sample["npy"] for sample in stream]
    assert np.array_equal(np.concatenate(blocks), ROWS)


def test_the_index_is_all_that_another_program_needs(folder):
    """The formula of docs/data.md, on the bytes of the file."""
    manifest = json.loads((folder / "manifest.json").read_text())
    index, row = manifest["index"], 0
    for shard in manifest["shards"]:
        raw = (folder / shard["name"]).read_bytes()
        for r in range(shard["sequences"]):
            member, inside = divmod(r, index["sequences_a_member"])
            start = index["first"] + member * index["member_bytes"] + inside * index["sequence_bytes"]
            ids = np.frombuffer(raw[start : start + index["sequence_bytes"]], dtype=manifest["dtype"])
            assert np.array_equal(ids, ROWS[row])
            row += 1


def test_rows_are_found_after_the_tar_was_written_with_other_block_sizes(folder, monkeypatch):
    monkeypatch.setattr(shards_module, "SEQUENCES_A_MEMBER", 256)
    assert np.array_equal(ShardSet(folder).rows(np.arange(23)), ROWS)


@pytest.mark.parametrize("pieces", [[23], [1] * 23, [5, 18], [16, 7]])
def test_a_shard_is_full_whatever_pieces_it_was_written_in(tmp_path, monkeypatch, pieces):
    small_members(monkeypatch, 4)
    writer = ShardWriter(tmp_path / "a", LENGTH, 70_000, shard_mib=0.002)  # two members of 1,024 bytes
    for part in np.split(ROWS, np.cumsum(pieces)[:-1]):
        writer.add(part)
    assert len(writer.pending) == 7 and writer.sequences == 23
    manifest = writer.close(**FACTS)
    assert [shard.sequences for shard in manifest.shards] == [8, 8, 7]
    assert np.array_equal(ShardSet(tmp_path / "a").rows(np.arange(23)), ROWS)
    with tarfile.open(tmp_path / "a/00000.tar") as tar:
        assert {(m.mtime, m.uid, m.uname, m.size) for m in tar} == {(0, 0, "", 128 + 4 * LENGTH * 4)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "00001.tar").unlink(), "00001.tar is missing"),
        (
            lambda f: (f / "00000.tar").write_bytes((f / "00000.tar").read_bytes()[:700]),
            "00000.tar has 700 bytes, its manifest says 10240",
        ),
        (lambda f: (f / "00000.tar").write_bytes(b""), "00000.tar has 0 bytes"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").unlink(), "no token shards in"),
        (lambda f: edit(f, format=1), "manifest.json was written by another version of lomdm_dist"),
        (lambda f: edit(f, length=12, index=json.loads(INDEX_OF_12)), "has uint32 sequences of 6"),
    ],
)
@pytest.mark.parametrize("verify", ["checksum", "size"])
def test_damage_names_the_file(folder, damage, message, verify):
    damage(folder)
    with pytest.raises(UserError, match=message):
        shards = ShardSet(folder, Access(verify))
        for error in shards.check():
            raise error
        shards.rows(np.arange(23))


INDEX_OF_12 = '{"first": 640, "sequences_a_member": 2, "member_bytes": 1024, "sequence_bytes": 48}'


def test_a_cut_shard_is_found_without_a_check_before(folder):
    (folder / "00000.tar").write_bytes((folder / "00000.tar").read_bytes()[:700])
    with pytest.raises(UserError, match=r"00000\.tar has 700 bytes"):
        ShardSet(folder).rows(np.array([3]))
    (folder / "00000.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"00000\.tar cannot be read"):
        ShardSet(folder).rows(np.array([3]))


def test_one_flipped_bit_is_found_by_the_checksum(folder):
    path = folder / "00002.tar"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (error,) = ShardSet(folder).check()
    assert "00002.tar was altered" in str(error) and error.number == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": 22}, "sequences is not the sum"),
        ({"packing": "sideways"}, "packing"),
        ({"length": 0}, "length"),
        ({"length": 7}, "index.sequence_bytes is not that of length"),
        ({"tokenizer": 3}, "tokenizer"),
        ({"shards": []}, "shards"),
        ({"dtype": "uint16"}, "not that of the vocabulary"),
    ],
)
def test_an_impossible_manifest_is_refused(folder, change, message):
    edit(folder, **change)
    with pytest.raises(UserError, match=f"manifest.json is damaged .*{message}"):
        ShardSet(folder)


def test_a_shard_outside_of_the_folder_is_refused(folder):
    edit(folder, lambda manifest: manifest["shards"][0].update(name="../evil.tar"))
    with pytest.raises(UserError, match=r"manifest\.json is damaged .shards\.0\.name"):
        ShardSet(folder)


@pytest.mark.parametrize("key", ["documents", "tokens", "split", "version", "identity"])
def test_any_edit_of_the_manifest_is_found(folder, key):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest[key] = "other" if isinstance(manifest[key], str) else manifest[key] + 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="sha256 is not that of the content: the file was edited"):
        ShardSet(folder)


def test_a_shard_listed_twice_is_refused(folder):
    edit(folder, lambda manifest: manifest["shards"].__setitem__(1, manifest["shards"][0]))
    with pytest.raises(UserError, match=r"sequences is not the sum|listed twice"):
        ShardSet(folder)


@pytest.mark.parametrize(("key", "value"), [("mask_id", int(ROWS[3, 2])), ("vocab_size", 65_600)])
def test_ids_that_are_not_text_are_refused(folder, key, value):
    edit(folder, lambda manifest: manifest["tokenizer"].update({key: value}))
    with pytest.raises(UserError, match=r"0000\d.tar holds ids that are not text"):
        ShardSet(folder).rows(np.arange(23))


def test_shards_of_another_model_are_refused(folder):
    fits = {"vocab_size": 70_000, "mask_id": 69_999, "length": LENGTH, "width": 8, "blocks": 1, "heads": 1}
    check_model_fits(ShardSet(folder), ModelConfig(**fits, eos_id=TOKENIZER["eos_id"]))
    other = ModelConfig(**fits | {"vocab_size": 70_001, "length": 8, "eos_id": 5})
    with pytest.raises(
        UserError,
        match=r"vocab_size is 70001, the shards have 70000; model.length is 8, .* model.eos_id is 5",
    ):
        check_model_fits(ShardSet(folder), other)


def test_uint16_where_the_vocabulary_allows(tmp_path):
    for vocab_size, dtype in ((65_536, "uint16"), (65_537, "uint32")):
        writer = ShardWriter(tmp_path / dtype, LENGTH, vocab_size)
        writer.add(np.full((1, LENGTH), vocab_size - 1))
        facts = TOKENIZER | {"vocab_size": vocab_size, "mask_id": 0}
        manifest = writer.close(**FACTS | {"tokenizer": facts})
        assert manifest.dtype == dtype
        assert (ShardSet(tmp_path / dtype).rows(np.array([0])) == vocab_size - 1).all()
        assert read_manifest(tmp_path / dtype).model_copy(update={"sha256": ""}) == manifest


def test_few_shards_are_open_at_once(folder, monkeypatch):
    monkeypatch.setattr(shards_module, "MOST_OPEN", 1)
    shards = ShardSet(folder)
    indices = np.random.default_rng(1).permutation(23)
    assert np.array_equal(shards.rows(indices), ROWS[indices]) and len(shards._open) == 1
