"""Mistakes at the command line: one clear line, exit status 2, no traceback, nothing overwritten."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lomdm_dist import cli, files
from lomdm_dist.cli import main
from lomdm_dist.config import Config
from lomdm_dist.data.prepare import Request, prepare
from lomdm_dist.errors import UserError
from lomdm_dist.train.inputs import run_lock

ROOT = Path(__file__).parents[1]


def mistake(capsys, *arguments, command=None) -> str:
    """The line that a mistake prints."""
    with pytest.raises(SystemExit) as stopped:
        main([str(a) for a in arguments], default_command=command)
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("error: ") and "Traceback" not in "".join(said)
    return said[-1]


def snapshot(folder: Path) -> dict:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def copy(trained_run, tmp_path):
    """The trained run and its data, free to be damaged."""
    run, data = (Path(shutil.copytree(p, tmp_path / p.name)) for p in trained_run)
    return run, data


def train_options(run: Path, data: Path, *more) -> list:
    overrides = [f"train.run={run}", f"data.train={data / 'train'}", f"data.valid={data / 'valid'}"]
    return ["--config", run / "config.yaml", *overrides, *more]


def test_train_py_names_the_nearest_key_and_exits_2():
    command = [sys.executable, "train.py", "--config", "configs/demo.yaml", "optim.lerning_rate=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert "did you mean optim.learning_rate?" in done.stderr and len(done.stderr.splitlines()) == 1
    with_traceback = subprocess.run([*command, "--debug"], cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" in with_traceback.stderr


def test_a_closed_standard_output_is_no_failure(trained_run):
    command = [
        "sh",
        "-c",
        'exec "$0" -m lomdm_dist.cli checkpoint verify "$1" >&-',
        sys.executable,
        trained_run.run,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "blamed"),
    [
        (["sample", "--checkpoint", ""], "--checkpoint"),
        (["sample", "--checkpoint="], "--checkpoint="),
        (["sample", "--checkpoint", "runs/demo", "--json", ""], "--json"),
        (["train", "--config", "configs/demo.yaml", "train.run="], "override 'train.run='"),
        (["train", "--config", "configs/demo.yaml", "data.train="], "override 'data.train='"),
    ],
)
def test_a_variable_that_is_not_set_is_not_the_folder_at_hand(words, blamed, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert blamed in said and "is empty: is a variable not set?" in said


def test_a_run_whose_folder_was_deleted_under_it_can_begin_again(tmp_path, capsys, trained_run):
    """What goes on to write there leaves its metrics alone."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(trained_run.run / "metrics.jsonl", run)
    overrides = [f"train.run={run}", "data.train=nowhere"]
    said = mistake(
        capsys, "--config", trained_run.run / "config.yaml", *overrides, "--resume", "auto", command="train"
    )
    assert "no token shards in nowhere" in said
    (run / "metrics.jsonl").rename(run / "else")
    data = trained_run.data
    said = mistake(capsys, *train_options(trained_run.run, data, f"train.run={run}"), command="train")
    assert "holds files that are not of a run" in said


def test_a_run_is_never_started_over(trained_run, capsys):
    before = snapshot(trained_run.run)
    said = mistake(capsys, *train_options(*trained_run, "train.steps=9"), command="train")
    assert "continue it with --resume auto" in said and snapshot(trained_run.run) == before


def test_a_finished_run_has_nothing_to_do(trained_run, capsys):
    before = snapshot(trained_run.run)
    main([str(o) for o in train_options(*trained_run, "--resume", "auto")], default_command="train")
    assert "nothing to do" in capsys.readouterr().out and snapshot(trained_run.run) == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.blocks=3", "model.blocks was 2, is 3"),
        ("model.width=64", "model.width was 32, is 64"),
        ("objective.c2=0.5", "objective.c2 was 0.65, is 0.5"),
        ("objective={name: window}", "objective.name was lomdm, is window"),
        ("objective.head=linear", "objective.head was transformer, is linear"),
        ("train.global_batch=16", "train.global_batch was 8, is 16"),
        ("model.length=32", "model.length is 32, the shards have 16"),
        ("model.vocab_size=301", "model.vocab_size is 301, the shards have 300"),
        ("train.micro_batch=3", "global_batch 8 is not a multiple of micro_batch 3"),
        ("data.valid=nowhere", "no token shards in nowhere"),
    ],
)
def test_what_cannot_continue_is_refused(trained_run, capsys, override, message):
    options = train_options(*trained_run, "train.steps=9", override, "--resume", "auto")
    assert message in mistake(capsys, *options, command="train")


@pytest.fixture(scope="session")
def other_data(tmp_path_factory):
    """Shards like those of `trained_run`, but for the text that the tokenizer was trained on."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "text.txt").write_text("\n\n".join(f"Quite other words, {i} of them." for i in range(400)))
    prepare(Request((str(folder / "text.txt"),), "bpe", 16, 300), folder / "data")
    return folder / "data"


def test_shards_of_another_tokenizer_are_refused(trained_run, other_data, capsys):
    options = train_options(trained_run.run, other_data, "train.steps=9", "--resume", "auto")
    assert "the tokenizer of the shards is another" in mistake(capsys, *options, command="train")
    said = mistake(capsys, "eval", "ppl", "--checkpoint", trained_run.run, "--data", other_data / "valid")
    assert "was made with another tokenizer" in said


@pytest.mark.parametrize("state", ["missing", "another"])
def test_a_tokenizer_that_is_not_the_shards_is_refused_before_training(copy, other_data, capsys, state):
    run, data = copy
    shutil.rmtree(data / "tokenizer")
    if state == "another":
        shutil.copytree(other_data / "tokenizer", data / "tokenizer")
    message = {
        "missing": "tokenizer/tokenizer.json is missing: put the right one back",
        "another": "is not the one that was recorded",
    }[state]
    options = train_options(run, data, "train.steps=9", "--resume", "auto")
    assert message in mistake(capsys, *options, command="train")


def test_damaged_shards_are_refused_before_training(copy, capsys):
    run, data = copy
    shard = data / "train/00000.tar"
    shard.write_bytes(shard.read_bytes()[:-3000])
    said = mistake(capsys, *train_options(run, data, "train.steps=9", "--resume", "auto"), command="train")
    assert str(shard) in said and "bytes, its manifest says" in said


def damage(checkpoint: Path, name: str):
    path = next(checkpoint.glob(name))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "name", [".metadata", "*.distcp", "state.json", "config.yaml", "tokenizer/tokenizer.json"]
)
def test_damaged_checkpoints_say_so(copy, capsys, name):
    run, _ = copy
    damage(run / "checkpoints/step-8", name)
    said = mistake(capsys, "sample", "--checkpoint", run)
    assert "step-8" in said
    said = mistake(capsys, "convert", "to-hf", run, run.parent / "export")
    assert "step-8" in said and not (run.parent / "export").exists()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda run: shutil.rmtree(run / "checkpoints/step-8"), "names step-8, but there is no"),
        (lambda run: (run / "latest").unlink(), "no file latest that names one: there are step-8"),
        (
            lambda run: (run / "latest").write_text(""),
            "names '', which is no step-N of that run: there are step-8",
        ),
        (lambda run: (run / "latest").write_text(".."), "names '..', which is no step-N"),
        (lambda run: (run / "latest").write_text("x" * 5000), f"names '{'x' * 40}', which is no step-N"),
        (
            lambda run: (run / "checkpoints/step-8/state.json").unlink(),
            "step-8 is damaged (state.json is missing)",
        ),
    ],
)
def test_missing_checkpoints_say_so(copy, capsys, broken, message):
    broken(copy[0])
    assert message in mistake(capsys, "sample", "--checkpoint", copy[0])


def test_another_rank_speaks_only_if_the_first_has_not_ended_the_job(capsys, monkeypatch):
    """By then a launcher has ended it where the first rank made the same mistake."""
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setitem(os.environ, "RANK", "1")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stopped:
        main(["--config", "nowhere.yaml"], default_command="train")
    assert stopped.value.code == 2 and waited == [5]
    assert capsys.readouterr().err.startswith("rank 1 on ")


def test_half_a_launchers_environment_is_refused(trained_run, capsys, monkeypatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    said = mistake(capsys, *train_options(*trained_run, "train.steps=9"), command="train")
    assert "WORLD_SIZE=2 but RANK=nothing" in said


@pytest.mark.parametrize("stop", ["0", "-3", "8"])
def test_a_stop_that_lies_behind_is_refused(trained_run, capsys, stop):
    options = train_options(*trained_run, "train.steps=9", "--resume", "auto", "--stop-after", stop)
    assert "the run starts at step 8" in mistake(capsys, *options, command="train")


def test_overrides_may_follow_options(trained_run, capsys):
    options = train_options(*trained_run, "--resume", "auto", "model.blocks=3")
    assert "model.blocks was 2, is 3" in mistake(capsys, *options, command="train")
    with pytest.raises(SystemExit) as stopped:
        main([str(o) for o in train_options(*trained_run, "--resum")], default_command="train")
    assert stopped.value.code == 2


@pytest.mark.parametrize("content", [None, "thesis.txt", "config.yaml"])
@pytest.mark.parametrize("resume", [[], ["--resume", "auto"]])
def test_a_run_folder_that_is_not_one_is_left_alone(trained_run, tmp_path, capsys, content, resume):
    run = tmp_path / "run"
    if content is None:
        run.write_text("mine")
    else:
        run.mkdir()
        (run / content).write_text("mine")
    options = train_options(trained_run.run, trained_run.data, f"train.run={run}", *resume)
    said = mistake(capsys, *options, command="train")
    assert "is a file" in said if content is None else "holds files that are not of a run" in said
    assert content is None or (run / content).read_text() == "mine"


def test_resuming_from_elsewhere_never_overwrites_a_run(copy, trained_run, capsys):
    run, data = copy
    before = snapshot(run)
    options = train_options(run, data, "train.steps=9", "--resume", trained_run.run)
    assert "holds checkpoints of its own" in mistake(capsys, *options, command="train")
    assert snapshot(run) == before


def test_other_sequences_are_refused(copy, trained_run, capsys):
    run, data = copy
    options = train_options(run, data, f"data.train={data / 'valid'}", "train.steps=9", "--resume", "auto")
    assert "are others" in mistake(capsys, *options, command="train")


def test_a_run_in_use_is_refused(copy, capsys):
    run, data = copy
    with run_lock(run):
        said = mistake(
            capsys, *train_options(run, data, "train.steps=9", "--resume", "auto"), command="train"
        )
    assert f"is in use by process {os.getpid()} on " in said


def test_a_disk_without_locks_is_said(tmp_path, monkeypatch):
    def flock(*arguments):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with pytest.raises(UserError, match=f"{tmp_path}: .* needs a file system with locks"), run_lock(tmp_path):
        pass


def test_a_full_disk_is_named_by_the_lock(tmp_path):
    """Nothing can be written to the lock: the folder is said."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # a file may be made, and nothing written to it
    try:
        with pytest.raises(UserError, match=f"cannot write to train.run {tmp_path}: "), run_lock(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("target", ["folder", "file/x.json"])
def test_an_unwritable_result_is_refused_before_the_work(trained_run, tmp_path, capsys, target):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    said = mistake(capsys, "sample", "--checkpoint", trained_run.run, "--json", tmp_path / target)
    assert "cannot write the result to" in said


def test_prepare_and_convert_follow_their_contract(trained_run, tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"A line of text, number {i}." for i in range(200)))
    options = ["--tokenizer", "bpe", "--vocab-size", "300", "--length", "8", "--valid-fraction", "0.2"]
    out, result = tmp_path / "out", tmp_path / "result.json"
    main(
        [
            "prepare",
            "text",
            "--input",
            str(tmp_path / "a.txt"),
            "--out",
            str(out),
            *options,
            "--json",
            str(result),
        ]
    )
    about = {"command", "versions", "machine", "config"}
    assert {"sequences", "tokens", "documents", "shards"} | about <= json.loads(result.read_text()).keys()
    main(["convert", "to-hf", str(trained_run.run), str(tmp_path / "hf"), "--json", str(result)])
    converted = json.loads(result.read_text())
    assert {"max_logit_difference", "parameters"} | about <= converted.keys()
    assert converted["max_logit_difference"] < 1e-5


def test_overrides_stand_anywhere(monkeypatch):
    """After an option that takes a list too; the words of another command are its own."""
    assert set(cli.SECTIONS) == set(Config.model_fields)
    words = ["bench", "step", "--config", "c.yaml", "--rows", "a", "b", "objective={name: mdlm}"]
    options = cli._parse(cli._parser(None), [*words, "--rounds", "3", "model.width=8"])
    assert options.rows == ["a", "b"] and options.rounds == 3
    assert options.overrides == ["objective={name: mdlm}", "model.width=8"]
    beside = ["sample", "--checkpoint", "a", "sampler.top_p=0.9", "--beside", "b", "objective.c2=0"]
    options = cli._parse(cli._parser(None), [*beside, "--steps", "4", "objective.c2=0.1"])
    assert options.overrides == ["sampler.top_p=0.9", "objective.c2=0.1"]
    assert options.beside == [["b", "objective.c2=0"]]
    with pytest.raises(SystemExit):
        cli._parse(cli._parser(None), [*beside[:-3], "--besid", "b", "objective.c2=0"])
    options = cli._parse(cli._parser(None), [*beside[:3], "--prompt", "data.x=1 hello", "sampler.top_p=0.9"])
    assert options.prompt == ["data.x=1 hello"] and options.overrides == ["sampler.top_p=0.9"]
    launched = ["launch", "torchrun", "train.py", "train.run=x"]
    assert cli._parse(cli._parser(None), launched).command == launched[1:]
