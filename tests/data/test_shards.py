import json

import numpy as np
import pytest
import webdataset

from lomdm_dist.data import shards as shards_module
from lomdm_dist.data.order import ShuffledOrder
from lomdm_dist.data.shards import ShardSet, ShardWriter, check_model_fits, read_manifest
from lomdm_dist.errors import UserError

LENGTH = 6
ROWS = np.random.default_rng(0).integers(0, 70_000, (23, LENGTH))
TOKENIZER = {"sha256": "x", "vocab_size": 70_000, "eos_id": 0, "mask_id": 69_999, "pad_id": None}
FACTS = {
    "version": "test",
    "split": "train",
    "packing": "packed",
    "tokenizer": TOKENIZER,
    "tokens": ROWS.size,
    "documents": 1,
    "dropped_tokens": 0,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Shards of 10 sequences in members of 4, so that every boundary is crossed."""
    monkeypatch.setattr(shards_module, "ROWS_A_MEMBER", 4)
    monkeypatch.setattr(shards_module, "ROWS_A_SHARD", 10)
    writer = ShardWriter(tmp_path / "shards", LENGTH, 70_000)
    for row in ROWS:
        writer.add(row)
    writer.close(**FACTS)
    return tmp_path / "shards"


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


def test_rows_are_found_after_the_tar_was_written_with_other_block_sizes(folder, monkeypatch):
    monkeypatch.setattr(shards_module, "ROWS_A_MEMBER", 256)
    assert np.array_equal(ShardSet(folder).rows(np.arange(23)), ROWS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "00001.tar").unlink(), "00001.tar is missing"),
        (
            lambda f: (f / "00000.tar").write_bytes((f / "00000.tar").read_bytes()[:700]),
            "00000.tar is cut short",
        ),
        (lambda f: (f / "00000.tar").write_bytes(b""), "00000.tar is cut short"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").unlink(), "no token shards in"),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_damage_names_the_file(folder, damage, message, verify):
    damage(folder)
    with pytest.raises(UserError, match=message):
        ShardSet(folder, verify=verify)


def test_one_flipped_bit_is_found_by_the_checksum(folder):
    path = folder / "00002.tar"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"00002\.tar is cut short or altered"):
        ShardSet(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": 22}, "sequences is not the sum"),
        ({"packing": "sideways"}, "packing"),
        ({"length": 0}, "length"),
        ({"tokenizer": 3}, "tokenizer"),
        ({"shards": []}, "shards"),
        ({"shards": [{"name": "../evil.tar", "sequences": 23, "sha256": ""}]}, "shards.0.name"),
        ({"dtype": "uint16"}, "not that of the vocabulary"),
    ],
)
def test_an_edited_manifest_is_refused(folder, change, message):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=f"manifest.json is damaged .*{message}"):
        ShardSet(folder)


def test_a_shard_listed_twice_is_refused(folder):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"][1] = manifest["shards"][0]
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="listed twice"):
        ShardSet(folder)


@pytest.mark.parametrize(("key", "value"), [("mask_id", int(ROWS[3, 2])), ("vocab_size", 65_600)])
def test_ids_that_are_not_text_are_refused(folder, key, value):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tokenizer"][key] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="hold ids that are not text"):
        ShardSet(folder).batch(np.arange(23), "cpu")


def test_shards_of_another_model_are_refused(folder):
    check_model_fits(ShardSet(folder), 70_000, 69_999, LENGTH)
    with pytest.raises(
        UserError, match=r"model.vocab_size is 50258, the shards have 70000; model.length is 8"
    ):
        check_model_fits(ShardSet(folder), 50_258, 69_999, 8)


def test_uint16_where_the_vocabulary_allows(tmp_path):
    for vocab_size, dtype in ((65_536, "uint16"), (65_537, "uint32")):
        writer = ShardWriter(tmp_path / dtype, LENGTH, vocab_size)
        writer.add(np.full(LENGTH, vocab_size - 1))
        manifest = writer.close(**FACTS | {"tokenizer": TOKENIZER | {"vocab_size": vocab_size}})
        assert manifest.dtype == dtype
        assert (ShardSet(tmp_path / dtype).rows(np.array([0])) == vocab_size - 1).all()
        assert read_manifest(tmp_path / dtype) == manifest


def test_each_epoch_is_the_whole_data_set_and_any_position_is_reached_directly():
    order = ShuffledOrder(size=10, seed=3)
    stream = order.at(0, 35)
    for epoch in range(3):
        assert sorted(stream[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert not np.array_equal(stream[:10], stream[10:20])
    assert np.array_equal(ShuffledOrder(10, 3).at(17, 8), stream[17:25])
    assert not np.array_equal(ShuffledOrder(10, 4).at(0, 10), stream[:10])
