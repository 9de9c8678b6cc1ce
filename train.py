"""Train: `deepspeed train.py --config configs/demo.yaml [section.key=value ...]`, or torchrun, or python."""

from lomdm_dist.cli import main

if __name__ == "__main__":
    main(default_command="train")
