"""Public checkpoints, made here with the documented names and shapes, become training checkpoints.

What they compute is written down once more below, in plain torch, from the published architecture.
"""

import collections
import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import save_file
from torch import Tensor

from lomdm_dist.cli import main
from lomdm_dist.config import load_config, make_config
from lomdm_dist.convert.public import read_public
from lomdm_dist.convert.weights import Weights
from lomdm_dist.data.tokenizer import load_tokenizer
from lomdm_dist.train.checkpoint import Checkpoint, parameter_shapes
from tests.distributed import grids
from tests.distributed.grids import on_processes
from tests.tiny import VOCABULARY, tiny_config

WIDTH, BLOCKS, HEADS, CONDITION, LENGTH = 32, 2, 4, 16, 12
LAYOUTS = ["mdlm", "bd3lm", "bd3lm without adaLN", "duo", "ar"]
PLAIN = ("ar", "bd3lm without adaLN")  # have no adaLN
SMALL = {"vocab_size": VOCABULARY, "width": WIDTH, "blocks": BLOCKS, "heads": HEADS, "condition": CONDITION}


def shapes_of(layout: str, vocab_size: int, width: int, blocks: int, heads: int, condition: int) -> dict:
    """Name and shape of every tensor, in the order of the file."""
    shapes = {"vocab_embed.embedding": [vocab_size, width]}
    modulated = layout not in PLAIN
    if modulated:
        for k, columns in ((0, 256), (2, condition)):
            shapes |= {
                f"sigma_map.mlp.{k}.weight": [condition, columns],
                f"sigma_map.mlp.{k}.bias": [condition],
            }
    shapes["rotary_emb.inv_freq"] = [width // heads // 2]
    for k in range(blocks):
        of_block = {
            "norm1.weight": [width],
            "attn_qkv.weight": [3 * width, width],
            "attn_out.weight": [width, width],
            "norm2.weight": [width],
            "mlp.0.weight": [4 * width, width],
            "mlp.0.bias": [4 * width],
            "mlp.2.weight": [width, 4 * width],
            "mlp.2.bias": [width],
        }
        if modulated:
            of_block |= {
                "adaLN_modulation.weight": [6 * width, condition],
                "adaLN_modulation.bias": [6 * width],
            }
        shapes |= {f"blocks.{k}.{name}": shape for name, shape in of_block.items()}
    shapes |= {
        "output_layer.norm_final.weight": [width],
        "output_layer.linear.weight": [vocab_size, width],
        "output_layer.linear.bias": [vocab_size],
    }
    if modulated:
        shapes["output_layer.adaLN_modulation.weight"] = [2 * width, condition]
        shapes["output_layer.adaLN_modulation.bias"] = [2 * width]
    shapes = {f"backbone.{name}": tuple(shape) for name, shape in shapes.items()}
    if layout.startswith("bd3lm"):
        shapes |= {"sampling_eps_min": (), "sampling_eps_max": ()}
    return shapes


def draw(layout: str, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = shapes_of(layout, **SMALL)
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    half = WIDTH // HEADS // 2
    tensors["backbone.rotary_emb.inv_freq"] = 1.0 / (10_000 ** (torch.arange(half).float() / half))
    return tensors


def reference(t: dict[str, Tensor], tokens: Tensor, causal: bool = False) -> Tensor:
    """The published network at time 0: tokens [B, L] -> logits [B, L, V], in a straight line."""
    t = {name.removeprefix("backbone."): tensor for name, tensor in t.items()}
    x = t["vocab_embed.embedding"][tokens]
    B, L, D = x.shape
    adaln = "sigma_map.mlp.0.weight" in t
    if adaln:
        frequencies = torch.exp(-math.log(10_000) * torch.arange(128) / 128)
        angles = torch.zeros(1, 1) * frequencies
        c = torch.cat([angles.cos(), angles.sin()], dim=-1)
        c = F.silu(F.linear(c, t["sigma_map.mlp.0.weight"], t["sigma_map.mlp.0.bias"]))
        c = F.silu(F.linear(c, t["sigma_map.mlp.2.weight"], t["sigma_map.mlp.2.bias"]))
    angles = torch.outer(torch.arange(L).float(), t["rotary_emb.inv_freq"])
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]

    def norm(x, name):
        return F.layer_norm(x, (D,)) * t[name]

    def turn(x):
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

    k = 0
    while f"blocks.{k}.norm1.weight" in t:
        b = f"blocks.{k}."
        shift1 = scale1 = shift2 = scale2 = torch.zeros(1, D)
        gate1 = gate2 = torch.ones(1, D)
        if adaln:
            m = F.linear(c, t[b + "adaLN_modulation.weight"], t[b + "adaLN_modulation.bias"])
            shift1, scale1, gate1, shift2, scale2, gate2 = m.chunk(6, dim=-1)
        h = norm(x, b + "norm1.weight") * (1 + scale1) + shift1
        q, key, v = (h @ t[b + "attn_qkv.weight"].T).reshape(B, L, 3, HEADS, D // HEADS).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", turn(q), turn(key)) / math.sqrt(D // HEADS)
        if causal:
            scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -math.inf)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(B, L, D)
        x = x + gate1 * (mixed @ t[b + "attn_out.weight"].T)
        h = norm(x, b + "norm2.weight") * (1 + scale2) + shift2
        h = F.gelu(F.linear(h, t[b + "mlp.0.weight"], t[b + "mlp.0.bias"]), approximate="tanh")
        x = x + gate2 * F.linear(h, t[b + "mlp.2.weight"], t[b + "mlp.2.bias"])
        k += 1
    h = norm(x, "output_layer.norm_final.weight")
    if adaln:
        name = "output_layer.adaLN_modulation."
        shift, scale = F.linear(c, t[name + "weight"], t[name + "bias"]).chunk(2, dim=-1)
        h = h * (1 + scale) + shift
    return F.linear(h, t["output_layer.linear.weight"], t["output_layer.linear.bias"])


def computed(folder: Path, kind: str, tokens: Tensor) -> Tensor:
    """Logits of the imported model's backbone."""
    backbone = Checkpoint(folder).build_model(kind).backbone
    with torch.no_grad():
        context = backbone.context(tokens.shape)
        return backbone.output(context.spread(backbone(tokens, context)), context.condition)


@pytest.fixture(scope="module")
def tokenizer(tiny_data) -> Path:
    return tiny_data / "tokenizer"


@pytest.fixture(scope="module")
def mask_id(tokenizer) -> int:
    return load_tokenizer(tokenizer).mask_token_id


def write_hf(folder: Path, layout: str, tensors: dict[str, Tensor], **facts) -> Path:
    """As `save_pretrained` of the public classes leaves it."""
    folder.mkdir()
    family = "bd3lm" if layout in PLAIN else layout
    config = {
        "model_type": family,
        "vocab_size": VOCABULARY,
        "model_length": LENGTH,
        "hidden_dim": WIDTH,
        "cond_dim": CONDITION,
        "n_blocks": BLOCKS,
        "n_heads": HEADS,
        "dropout": 0.1,
    }
    if family != "mdlm":
        config["causal"] = layout == "ar"
    if family == "bd3lm":
        config |= {"adaln": layout not in PLAIN, "block_size": 4, "cross_attn": layout != "ar"}
    (folder / "config.json").write_text(json.dumps(config | facts))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Settings:
    """Stands for the objects of other packages in a Lightning file; here none can be imported."""

    def __init__(self):
        self.model = {"length": LENGTH}


def write_lightning(path: Path, raw: dict[str, Tensor], ema: dict[str, Tensor] | None) -> Path:
    buffers = ("backbone.rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max")
    averages = None
    if ema is not None:
        shadows = [tensor for name, tensor in ema.items() if name not in buffers]
        averages = {"decay": 0.9999, "num_updates": 7, "shadow_params": shadows}
    content = {
        "epoch": 1,
        "global_step": 7,
        "state_dict": collections.OrderedDict(raw),
        "ema": averages,
        "hyper_parameters": {"config": Settings(), "more": collections.defaultdict(list, a=[1])},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3)}}}],
    }
    torch.save(content, path)
    return path


def convert(source: Path, out: Path, *options) -> dict:
    result = out.with_name(out.name + ".json")
    main(["convert", "from-hf", str(source), str(out), *map(str, options), "--json", str(result)])
    return json.loads(result.read_text())


def mistake(source: Path, *options, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "from-hf", str(source), str(source) + ".out", *map(str, options)])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def same_logits(ours: Tensor, theirs: Tensor, mask_id: int) -> None:
    """Of all tokens but the mask, which is never predicted here."""
    keep = torch.arange(VOCABULARY) != mask_id
    assert theirs.std() > 0.1
    assert (ours[..., keep] - theirs[..., keep]).abs().max() < 1e-5 * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hugging_face_form(layout, tmp_path, tokenizer, mask_id):
    tensors, causal = draw(layout), layout == "ar"
    source = write_hf(tmp_path / "public", layout, tensors)
    result = convert(source, tmp_path / "out", "--tokenizer", tokenizer)
    assert result["layout"] == layout.split()[0]
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    for kind in ("raw", "ema"):
        ours = computed(tmp_path / "out", kind, tokens)
        same_logits(ours, reference(tensors, tokens, causal), mask_id)
    config = Checkpoint(tmp_path / "out").config
    assert config.model.dropout == 0.1
    assert config.objective.name == ("ar" if causal else "mdlm")
    assert (config.model.length, config.model.heads) == (LENGTH, HEADS)
    notes = " ".join(result["notes"])
    said = {"bd3lm": "second stream", "duo": "uniform noise", "ar": "BOS", "mdlm": "one set of weights"}
    assert said[result["layout"]] in notes
    assert ("always 0" in notes) == (layout == "duo")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lightning_form(layout, tmp_path, tokenizer, mask_id):
    """Without config.json: the layout is asked for where names do not tell, and so is the length."""
    raw, ema = draw(layout), draw(layout, seed=5)
    ema["backbone.rotary_emb.inv_freq"] = raw["backbone.rotary_emb.inv_freq"]
    source = write_lightning(tmp_path / "last.ckpt", raw, ema)
    told = [] if layout in ("bd3lm", "ar") else ["--layout", layout.split()[0]]
    result = convert(source, tmp_path / "out", *told, "--tokenizer", tokenizer, f"model.length={LENGTH}")
    assert result["layout"] == layout.split()[0]
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    for kind, tensors in (("raw", raw), ("ema", ema)):
        ours = computed(tmp_path / "out", kind, tokens)
        same_logits(ours, reference(tensors, tokens, layout == "ar"), mask_id)


def test_weights_alone_in_a_torch_file(tmp_path, tokenizer, mask_id):
    tensors = draw("mdlm")
    source = write_hf(tmp_path / "public", "mdlm", tensors)
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    convert(source, tmp_path / "out", "--tokenizer", tokenizer)
    tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    same_logits(computed(tmp_path / "out", "ema", tokens), reference(tensors, tokens), mask_id)


# width, blocks, heads: of the public models and of the paper's ablation, GPT-2's and BERT's vocabularies
SIZES = [(768, 12, 12, 50258), (512, 8, 8, 30522), (768, 12, 12, 30522), (1024, 24, 16, 30522)]
PARAMETERS = {(768, 12, 50258): 169_627_218, (512, 8, 30522): 59_831_866}
PARAMETERS |= {(768, 12, 30522): 139_292_986, (1024, 24, 30522): 384_037_946}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_all_sizes_of_the_family_by_shape(layout, size):
    width, blocks, heads, vocab_size = size
    shapes = shapes_of(layout, vocab_size, width, blocks, heads, 128)
    rotary = 1.0 / (10_000 ** (torch.arange(32) / 32))
    found = read_public(layout.split()[0], Weights(shapes, lambda _: rotary), None, {}, "a file")
    values = found.model | {"mask_id": 103, "length": 128}
    expected = parameter_shapes_of(values, found.objective)
    assert {name: math.prod(shape) for name, shape in found.kinds["raw"].shapes.items()} == expected
    assert sum(expected.values()) == PARAMETERS[(width, blocks, vocab_size)]


def parameter_shapes_of(model: dict, objective: str) -> dict[str, int]:
    rest = {"run": "x", "steps": 1, "global_batch": 1, "micro_batch": 1}
    values = {"model": model, "objective": {"name": objective}, "data": {"train": "x", "valid": "x"}}
    shapes = parameter_shapes(make_config(values | {"train": rest}, [], "a test"))
    return {name: math.prod(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_renamed_missing_extra_or_misshapen_tensor_is_named(layout, tmp_path, tokenizer, capsys):
    name = "backbone.blocks.1.mlp.0.weight"
    tensors = draw(layout)
    changed = {
        "backbone.blocks.1.mlp.zero.weight": {
            key.replace("1.mlp.0", "1.mlp.zero"): tensors[key] for key in tensors
        },
        "backbone.label_map.weight": tensors | {"backbone.label_map.weight": torch.zeros(2)},
        "teacher.x": tensors | {"teacher.x": torch.zeros(2)},
        f"{name} is missing": {key: value for key, value in tensors.items() if key != name},
        f"{name} has the shape [3, 32], not [128, 32]": tensors | {name: torch.zeros(3, WIDTH)},
    }
    for number, (said, wrong) in enumerate(changed.items()):
        source = write_hf(tmp_path / str(number), layout, wrong)
        assert said in mistake(source, "--tokenizer", tokenizer, capsys=capsys)
        assert not Path(f"{source}.out").exists()


def test_averages_that_are_not_of_the_parameters(tmp_path, tokenizer, capsys):
    raw, ema = draw("mdlm"), draw("mdlm")
    del ema["backbone.blocks.0.norm1.weight"]
    source = write_lightning(tmp_path / "last.ckpt", raw, ema)
    options = ["--layout", "mdlm", "--tokenizer", tokenizer, "model.length=12"]
    assert "shadow_params" in mistake(source, *options, capsys=capsys)
    raw["teacher.weight"] = torch.zeros(2)
    source = write_lightning(tmp_path / "more.ckpt", raw, draw("mdlm"))
    assert "no place for teacher.weight" in mistake(source, *options, capsys=capsys)


def test_what_a_file_does_not_say_is_asked_for(tmp_path, tokenizer, capsys):
    tensors = draw("mdlm")
    source = write_lightning(tmp_path / "last.ckpt", tensors, None)
    assert "MDLM's or Duo's" in mistake(source, "--tokenizer", tokenizer, capsys=capsys)
    blocks = write_lightning(tmp_path / "blocks.ckpt", draw("bd3lm without adaLN"), None)
    assert "BD3LM's or its AR" in mistake(blocks, "--tokenizer", tokenizer, capsys=capsys)
    assert "--tokenizer" in mistake(source, "--layout", "mdlm", capsys=capsys)
    assert "is no export of to-hf" in mistake(source, "--layout", "lomdm", capsys=capsys)
    options = ["--layout", "mdlm", "--tokenizer", tokenizer]
    assert "model.length=NUMBER" in mistake(source, *options, capsys=capsys)
    del tensors["backbone.rotary_emb.inv_freq"]
    source = write_lightning(tmp_path / "again.ckpt", tensors, None)
    assert "model.heads=NUMBER" in mistake(source, *options, "model.length=12", capsys=capsys)
    convert(source, tmp_path / "out", *options, "model.length=12", f"model.heads={HEADS}")
    assert load_config(tmp_path / "out/config.yaml").model.heads == HEADS


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"n_heads": 8}, "config.json says n_heads 8"),
        ({"n_blocks": 3}, "config.json says n_blocks 3"),
        ({"vocab_size": 301}, "config.json says vocab_size 301"),
        ({"model_type": "bd3lm"}, "the config.json in"),
        ({"model_type": "gpt2"}, "is GPT-2 itself"),
    ],
)
def test_a_config_that_says_otherwise(facts, said, tmp_path, tokenizer, capsys):
    source = write_hf(tmp_path / "public", "mdlm", draw("mdlm"), **facts)
    assert said in mistake(source, "--layout", "mdlm", "--tokenizer", tokenizer, capsys=capsys)


def test_another_rotary_base_or_tokenizer_is_refused(tmp_path, tokenizer, capsys):
    tensors = draw("mdlm")
    tensors["backbone.rotary_emb.inv_freq"] **= 1.1
    source = write_hf(tmp_path / "rotary", "mdlm", tensors)
    assert "of base 10,000, the only one here" in mistake(source, "--tokenizer", tokenizer, capsys=capsys)
    tensors = draw("mdlm")
    tensors["backbone.vocab_embed.embedding"] = torch.zeros(400, WIDTH)
    source = write_hf(tmp_path / "rows", "mdlm", tensors, vocab_size=400)
    assert "300 ids and the mask" in mistake(source, "--tokenizer", tokenizer, capsys=capsys)


def test_nothing_in_a_file_is_run(tmp_path, tokenizer, capsys):
    """A class of the file's own comes to nothing; what would act is refused."""

    class Touch:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'run'}",)

    torch.save({"state_dict": draw("mdlm"), "hyper_parameters": Touch()}, tmp_path / "last.ckpt")
    options = ["--layout", "mdlm", "--tokenizer", tokenizer, "model.length=12"]
    said = mistake(tmp_path / "last.ckpt", *options, capsys=capsys)
    assert "without running what stands in it" in said and not (tmp_path / "run").exists()


def test_a_lomdm_starts_from_a_public_mdlm(tmp_path, tiny_data, tokenizer):
    """The recipe of the documentation: backbone from the file, heads new."""
    tensors = draw("mdlm")
    convert(write_hf(tmp_path / "public", "mdlm", tensors), tmp_path / "mdlm", "--tokenizer", tokenizer)
    path, run = tmp_path / "tiny.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(tiny_config(tiny_data, run)))
    overrides = [f"train.start_from={tmp_path / 'mdlm'}", f"model.heads={HEADS}", "train.steps=1"]
    on_processes(1, grids.train, [*overrides, "optim.learning_rate=1e-30"], None, path)
    model = Checkpoint(run).build_model("raw")
    name = "backbone.blocks.1.mlp.0.weight"
    assert torch.equal(model.backbone.blocks[1].mlp_in.weight, tensors[name])
    assert model.phi.block.qkv.weight.std() > 0.01
