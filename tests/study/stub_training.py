"""Stands in for `lomdm train` where a sweep is tested: its folder is as the real one's, its steps are quick.

A checkpoint is a state and a config. As the real one it holds the run's lock, refuses data that are not
there, resumes, and saves when it is asked to stop. What it did stands in RUN.did: `from K`, then each step.
"""

import fcntl
import json
import signal
import sys
import time

from lomdm_dist.config import load_config

STEP_SECONDS = 0.05


def main(words: list[str]) -> int:
    config = load_config(words[words.index("--config") + 1], [word for word in words if "=" in word])
    run, asked = config.train.run, []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    if "missing" in config.data.train[0].path:
        print(f"error: no shards in {config.data.train[0].path}")
        return 2
    run.mkdir(exist_ok=True)
    lock = open(run / "lock", "a+")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    done = int((run / "latest").read_text()[5:]) if (run / "latest").exists() else 0
    config.save(run / "config.yaml")
    with open(run.with_name(run.name + ".did"), "a", buffering=1) as did:
        print(f"from {done}", file=did)
        for step in range(done + 1, config.train.steps + 1):
            time.sleep(STEP_SECONDS)
            print(step, file=did)
            _report(config, step)
            if asked and step < config.train.steps:
                _save(config, step)
                return 75
    _save(config, config.train.steps)
    return 0


def _report(config, step: int) -> None:
    loss = 5 / step + config.optim.learning_rate
    numbers = {"tokens": 128 * step, "tokens_per_second": 100.0, "seconds": 1.28, "memory": 0.5}
    with open(config.train.run / "metrics.jsonl", "a") as file:
        print(json.dumps({"step": step, "loss": loss, **numbers}), file=file)
        if step % config.train.valid_every == 0 or step == config.train.steps:
            print(json.dumps({"step": step, "valid_nll_per_token": loss}), file=file)


def _save(config, step: int) -> None:
    folder = config.train.run / f"checkpoints/step-{step}"
    folder.mkdir(parents=True)
    config.save(folder / "config.yaml")
    (folder / "state.json").write_text(json.dumps({"step": step}))
    (config.train.run / "latest").write_text(f"step-{step}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
