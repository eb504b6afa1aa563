"""Compiled steps whose logits rule the peak: torch.compile, its budgets, its chunker, and olla with losses in chunks.

    python bench/inductor/bench_chunked.py --markdown bench/results/inductor/chunked.md
    python bench/inductor/bench_chunked.py --cases gpt2 --settings default auto_chunker "chunked 5 %"

Peaks are those of the wrappers that Inductor generates for the CPU, replayed on fake tensors, without an optimizer;
recomputed are flops of matrix products and attention, as a share of the step's.

    default, budget B   torch.compile, with activation_memory_budget=B
    auto_chunker        torch.compile with TORCHINDUCTOR_AUTO_CHUNKER
    olla F %, least     max_slowdown=F, minimise="peak"
    chunked F %, least  the same with chunked_loss=8 (auto: with "auto")

Results are kept in --folder as they are found, and read from there unless the code has changed. Exit status: 0; 1 if a
chunked step of 5 % is less than 30 % below the best of torch's, or one of them is not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for bench

from bench.support.harness import REPOSITORY, Cell, Report
from olla.inductor.compat.compat import code_digest, config, memory_budget
from olla.inductor.settings import patches
from olla.inductor.simulate.step import replay

CASES = {"gpt2 4 x 256, vocabulary 50,257, 8 x 512": "gpt2", "llama 12 x 1024, vocabulary 151,936, 1 x 2048": "llama"}
OURS: dict[str, dict[str, Any]] = {"5 %": {"max_slowdown": 0.05}, "least": {"minimise": "peak"}}
THEIRS = ("default", "budget 0.5", "budget 0.3", "auto_chunker")
CHUNKED = ("chunked 5 %", "chunked least", "chunked auto")
SETTINGS = (*THEIRS, "olla 5 %", "olla least", *CHUNKED)
COLUMNS = ["model", "setting", "peak MiB", "of the best of torch's, %", "recomputed flops, %", "saved MiB", "compile s"]
MEBI = 2**20
_TARGET = 0.7


class CausalLoss(torch.nn.Module):
    """A language model of transformers and the cross-entropy of its logits."""

    def __init__(self, kind: str) -> None:
        import transformers

        super().__init__()
        common: dict[str, Any] = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
        if kind == "gpt2":
            off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0)
            config = transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4, **off, **common)
            self.model = transformers.GPT2LMHeadModel(config)
        else:
            sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 151_936}
            heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}
            self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **common))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean over all tokens."""
        logits = self.model.lm_head(self.model.base_model(tokens)[0])
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def measure(kind: str, setting: str) -> dict[str, float]:
    """Return the figures of one step under a setting."""
    with torch.device("meta"):
        model = CausalLoss(kind)
    tokens = torch.zeros((8, 512) if kind == "gpt2" else (1, 2048), dtype=torch.long)
    first, _, value = setting.partition(" ")
    if first in ("default", "budget"):
        configured = memory_budget(float(value or 1))
    elif first == "auto_chunker":
        configured = config.patch({"auto_chunker.enable": True})
    else:
        chunks = {"chunked": "auto" if value == "auto" else 8}.get(first)
        configured = config.patch(patches(**OURS.get(value, OURS["5 %"]), chunked_loss=chunks))
    with configured:
        run = replay(model, (tokens, tokens), lambda model, batch: model(*batch))
    return {
        "peak_bytes": run.peak_bytes,
        "recomputed": run.recomputed_flops / run.flops,
        "saved_bytes": sum(split.saved_bytes for split in run.splits),
        "seconds": run.compile_seconds,
    }


def stamp(setting: str) -> str:
    """Return what a result depends on besides case and setting."""
    return str(torch.__version__) if setting in THEIRS else f"{torch.__version__} {code_digest()}"


def find(path: Path, case: str, settings: list[str]) -> dict[str, dict[str, Any]]:
    """Measure what is not known yet of a case; return all that is."""
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
    for setting in settings:
        if found.get(setting, {}).get("stamp") == stamp(setting):
            continue
        torch.compiler.reset()
        try:
            found[setting] = {**measure(CASES[case], setting), "stamp": stamp(setting)}
        except Exception:
            traceback.print_exc()
            continue
        path.write_text(json.dumps(found, indent=1))
        print(f"{case}: {setting}: {found[setting]['peak_bytes'] / MEBI:.0f} MiB", file=sys.stderr, flush=True)
    return found


def add(page: Report, case: str, found: dict[str, dict[str, Any]]) -> bool:
    """Add the rows of a case; return whether chunks reach what they are to."""
    best = min((found[s]["peak_bytes"] for s in THEIRS if s in found), default=None)
    for setting in (s for s in SETTINGS if s in found):
        figures = found[setting]
        row: list[Cell] = [case, setting, figures["peak_bytes"] / MEBI]
        row.append(100 * figures["peak_bytes"] / best if best else None)
        row += [100 * figures["recomputed"], figures["saved_bytes"] / MEBI, figures["seconds"]]
        page.rows.append(row)
    ours = found.get(CHUNKED[0])
    if best is None or ours is None:
        return False
    page.summary[f"{case}: chunks at 5 % below the best of torch's, %"] = 100 * (1 - ours["peak_bytes"] / best)
    return bool(ours["peak_bytes"] <= _TARGET * best)


def main() -> int:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES.values()), default=list(CASES.values()))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "bench_chunked")
    parser.add_argument("--only-report", action="store_true", help="what was found before")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    page = Report("Compiled steps whose logits rule the peak: losses in chunks of rows", COLUMNS)
    reached, missing = True, []
    for case, kind in CASES.items():
        settings = arguments.settings if kind in arguments.cases and not arguments.only_report else []
        found = find(arguments.folder / f"{kind}.json", case, settings)
        reached = add(page, case, found) and reached
        missing += [f"{kind}: {s}" for s in SETTINGS if s not in found]
        old = [f"{kind}: {s}" for s in found if found[s]["stamp"] != stamp(s)]
        page.summary[f"{kind}: found with earlier code"] = "; ".join(old) or "-"
    page.summary["not measured"] = "; ".join(missing) or "-"
    page.summary["30 % below the best of torch's"] = "yes" if reached else "not of all, or not measured"
    page.print()
    if arguments.markdown:
        page.save(arguments.markdown)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
