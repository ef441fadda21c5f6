"""Generated cases: random tiny architectures, hostile documents, any combination of options.

    python -m tests.fuzz [--cases 500] [--seed 0] [--jobs 2]

Every analyzer must give a valid result or refuse with an InterpError: never another exception, a
number that is not finite where there must be one, a share outside [0, 1], an interval the wrong way
round. Some results are also measured again in other batches, saved and loaded, and drawn as a page,
in which foreign text must stay text. Case `i` of seed `s` is the same on every machine. Exit status
1 if anything went wrong, with what reproduces it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import html.parser
import logging
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pandas as pd
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests import tiny

MODELS = 24
"""Architectures of a seed; every case takes one of them."""
HOSTILE = (
    "</script><script>alert(1)</script>",
    '" onmouseover="x" a="',
    "<b id=hostile>bold</b> &amp; & <!-- ",
    "\u202eright to left \u2066 isolates",
    "zero\u200bwidth\ufeff joiners\u200d here",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 emoji \U0001f600 pieces",
    "NUL \x00 and \x1b[31m escapes \x07 \r\n\t tabs",
    "a" * 10_000,
    " \n \u3000 ",
    "<|endoftext|> <s> </s> <unk> literal special tokens",
    "$\\frac{a}{b}$ `code` |pipe| *stars* [link](http://x)",
    "combining e\u0301\u0301\u0301 \u0e01\u0e33",
    "\ud800 lone surrogate",
    "",
)


# What is drawn ------------------------------------------------------------------------------------


def architecture(of: int, index: int) -> tuple[str, dict[str, Any]]:
    """Family and config of a seed's model."""
    rng = random.Random(f"{of}-{index}")
    family = rng.choice(tiny.FAMILIES)
    layers, heads = rng.randint(1, 3), rng.randint(1, 6)
    if family == "gpt2":
        head = rng.choice((2, 5, 8))
        return family, {
            "n_layer": layers,
            "n_head": heads,
            "n_embd": heads * head,
            "n_inner": rng.choice((None, 7, 40)),
            "activation_function": rng.choice(("gelu_new", "gelu", "relu", "silu")),
            "tie_word_embeddings": rng.random() < 0.5,
            "scale_attn_by_inverse_layer_idx": rng.random() < 0.2,
        }
    head = rng.choice((4, 8))
    shared = {"num_hidden_layers": layers, "num_attention_heads": heads}
    shared |= {"intermediate_size": rng.choice((9, 40))}
    if family.startswith("neox"):
        return family, shared | {
            "hidden_size": heads * head,
            "rotary_pct": rng.choice((0.5, 1.0)),
            "attention_bias": rng.random() < 0.9,  # TransformerBridge has none without
            "hidden_act": rng.choice(("gelu", "relu", "silu")),
        }
    return family, shared | {
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": head,
        "hidden_size": heads * rng.choice((5, 8, 11)),
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "hidden_act": rng.choice(("silu", "gelu")),
    }


def some(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any subset of options, each drawn."""
    return st.fixed_dictionaries({}, optional=options)


FLAG = st.booleans()
DOCUMENT = st.one_of(
    st.sampled_from(tiny.corpus(40)),
    st.sampled_from(tiny.corpus(40)),
    st.sampled_from(HOSTILE),
    st.text(min_size=0, max_size=80),
)
TEXT = some(
    documents=st.integers(1, 12),
    context=st.integers(2, tiny.CONTEXT),
    bos=st.none() | FLAG,
    windows=FLAG,
    min_tokens=st.integers(2, 5),
    seed=st.integers(0, 5),
)
RUN = {"seed": st.integers(0, 3), "batch_size": st.sampled_from(["auto", 1, 3])}
WORDS = st.text(min_size=1, max_size=12) | st.sampled_from(["the lamp", " river", "\U0001f600"])
OPTIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "heads": some(
        prune=FLAG,
        step=st.sampled_from([0.1, 0.3, 0.5, 1.0]),
        rescore=FLAG,
        unit=st.sampled_from(["head", "kv"]),
        exact=FLAG,
        ablation=st.sampled_from(["zero", "mean", "resample"]),
        keep_one=FLAG,
        **RUN,
    ),
    "asymmetry": some(activations=FLAG, controls=FLAG, symmetrise=FLAG, **RUN),
    "ffn_keys": some(
        layer=st.lists(st.integers(0, 3), max_size=2).map(tuple) | st.just(("all",)),
        key=st.lists(st.integers(0, 50), max_size=2).map(tuple),
        top=st.integers(1, 30),
        sign=st.sampled_from(["positive", "both"]),
        prompt=WORDS,
        target=WORDS,
        mutation_keys=st.integers(0, 5),
        mixture_positions=st.integers(0, 30) | st.just("auto"),
        sample_documents=st.integers(1, 5) | st.just("auto"),
        **RUN,
    ),
    "qkv": some(fit_documents=st.integers(1, 8), each=st.sampled_from(["mean", "none"]), **RUN),
    "superposition": some(
        layer=st.integers(0, 3),
        width=st.lists(st.integers(1, 3), max_size=2, unique=True).map(tuple),
        k=st.integers(1, 12),
        arch=st.sampled_from(["topk", "batchtopk", "jumprelu", "standard", "gated"]),
        sparsity=st.sampled_from([0.0, 1.0, 30.0]),
        train_tokens=st.integers(1, 300),
        train_batch=st.integers(1, 64),
        lr=st.sampled_from([1e-4, 1e-2]),
        loss_documents=st.integers(0, 4),
        top=st.integers(1, 5),
        concepts=st.just(False),
        **RUN,
    ),
}
SHARES = {"heads": 8, "asymmetry": 5, "ffn_keys": 6, "qkv": 2, "superposition": 2}


def cases(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Of one analyzer."""
    least, text = 1, TEXT
    if name == "superposition":  # which trains on what it does not judge
        least = 5
        text = st.builds(lambda a, n: a | {"documents": n}, TEXT, st.integers(1, 4))
    return st.fixed_dictionaries(
        {
            "analyzer": st.just(name),
            "model": st.integers(0, MODELS - 1),
            "documents": st.lists(DOCUMENT, min_size=least, max_size=12),
            "text": text,
            "options": OPTIONS[name],
            "again": st.integers(0, 7).map(lambda n: n == 0),
            "page": st.integers(0, 5).map(lambda n: n == 0),
        }
    )


# What must hold -----------------------------------------------------------------------------------


UNSTEADY = (
    *(
        "p_value",
        "q_value",
        "_p",
        "_q",
        "percentile",
        "rank",
        "beyond",
        "flipped",
        "directionality",
    ),
    *("similarity", "earlier", "change", "agreement", "unchanged", "refined", "overridden"),
)


class WrongError(Exception):
    """A result that is not valid."""


def valid(result: Any) -> None:
    """No infinity, shares and probabilities within [0, 1], intervals the right way round."""
    result.to_json()
    for name, table in result.tables.items():
        for column in table.columns:
            what = f"{name}.{column}"
            meaning = result.columns[name][column]
            if not pd.api.types.is_numeric_dtype(table[column].dtype):
                continue
            values = np.array(table[column].astype("Float64").to_numpy(float, na_value=np.nan))
            if np.isinf(values).any():
                raise WrongError(f"{what} holds an infinity")
            known = values[np.isfinite(values)]
            # The ends of a t interval of a share may lie beyond; the share may not.
            end = str(column).endswith(("_low", "_high"))
            share = meaning.unit == "probability" or meaning.unit.startswith("share of pos")
            if share and not end and ((known < -1e-9) | (known > 1 + 1e-9)).any():
                raise WrongError(f"{what} is outside [0, 1]: {known.min()} to {known.max()}")
            if column == "kl" and (known < -1e-5).any():
                raise WrongError(f"{what}: a negative divergence {known.min()}")
            if column in ("fvu", "null_sd", "stable_rank") and (known < 0).any():
                raise WrongError(f"{what} is negative: {known.min()}")
        for low in [c for c in table.columns if str(c).endswith("_low")]:
            high = str(low).removesuffix("_low") + "_high"
            if high in table.columns:
                ends = table[[low, high]].dropna().to_numpy(dtype=float)
                if (ends[:, 0] > ends[:, 1] + 1e-9).any():
                    raise WrongError(f"{name}.{low} is above {high}")
    if result.analyzer == "heads":
        own = result.tables["heads"]
        for column in {"importance", "importance_norm", "loss_delta", "kl"} & set(own.columns):
            if own[column].isna().any():
                raise WrongError(f"heads.{column} lacks a number")
    for key, value in flat(result.summary):
        if isinstance(value, float) and not math.isfinite(value):
            raise WrongError(f"summary {key} is {value}")


def flat(value: Any, name: str = "") -> Any:
    """Every number of nested lists and mappings, with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from flat(inner, f"{name}.{i}")
    else:
        yield name, value


def same(first: Any, second: Any) -> None:
    """Two runs that differ in their batches only: every number that is no rank and no test."""
    compared = 0
    for name in set(first.tables) & set(second.tables):
        one, two = first.tables[name], second.tables[name]
        if len(one) != len(two):
            raise WrongError(f"{name} has {len(one)} rows or {len(two)}, by the batch size")
        for column in one.select_dtypes("float").columns:
            # What is near a threshold, or equal to others, may be on either side of it.
            if any(word in column for word in UNSTEADY):
                continue
            pair = [table[column].to_numpy(dtype=float) for table in (one, two)]
            compared += 1
            if not np.allclose(*pair, atol=5e-3, rtol=5e-3, equal_nan=True):
                raise WrongError(f"{name}.{column} depends on the batch size")
    if not compared:
        raise WrongError("nothing was compared")


class Foreign(html.parser.HTMLParser):
    """Notices tags and attributes that only a document can have brought."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if dict(attrs).get("id") == "hostile" or any(k.startswith("on") for k, _ in attrs):
            raise WrongError(f"the page has <{tag} {attrs}>: foreign text became markup")


def drawn(result: Any) -> None:
    """Saved and loaded, and as a page."""
    import interp
    from interp.report import markdown, render

    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "run")
        loaded = interp.load_result(Path(folder) / "run")
    for name, table in result.tables.items():
        if list(loaded.tables[name].columns) != list(table.columns):
            raise WrongError(f"{name} has other columns when it is loaded")
    page = render([loaded])
    if "<script>alert(1)" in page:
        raise WrongError("the page runs a document's script")
    Foreign().feed(page)
    markdown([loaded])


# Running ------------------------------------------------------------------------------------------


class Runner:
    """Cases of one seed, and what came of them."""

    def __init__(self, of: int, show: str | None = None) -> None:
        self.seed, self.show = of, show
        self.folder = Path(tempfile.mkdtemp(prefix="interp-fuzz-"))
        self.models: dict[int, Any] = {}
        self.came: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []

    def model(self, index: int) -> Any:
        """The model, or the InterpError that it is refused with."""
        from interp import InterpError, load_model

        if index not in self.models:
            family, overrides = architecture(self.seed, index)
            folder = tiny.make_checkpoint(family, self.folder / str(index), index, **overrides)
            try:
                self.models[index] = load_model(folder, device="cpu")
            except InterpError as error:
                self.models[index] = error
        return self.models[index]

    def case(self, case: dict[str, Any]) -> None:
        """Run one; whatever goes wrong is kept and told at the end."""
        from interp import InterpError

        try:
            self.came[self.run(case)] += 1
        except InterpError as error:
            self.came["refused"] += 1
            self.reasons[str(error)[:70]] += 1
            if self.show is not None and self.show in str(error):
                shape = architecture(self.seed, case["model"])
                print(f"{traceback.format_exc(limit=-4)}\n{shape}\n{case!a}")
            if not str(error).strip() or "\n" in str(error):
                self.failures.append(f"a refusal that is not one sentence: {error!r}\n{case}")
        except Exception:
            self.came["wrong"] += 1
            shape = architecture(self.seed, case["model"])
            self.failures.append(f"{traceback.format_exc(limit=-4)}\n{shape}\n{case}")

    def run(self, case: dict[str, Any]) -> str:
        """What came of it: a result, mostly."""
        import interp
        import probes

        model = self.model(case["model"])
        if isinstance(model, Exception):
            raise model
        text = interp.load_text(case["documents"], model, **case["text"])
        home = probes if case["analyzer"] == "superposition" else interp
        call = getattr(home, case["analyzer"])
        options = {"progress": False} | case["options"]
        result = call(model, text, **options)
        valid(result)
        if case["again"] and case["analyzer"] != "superposition":  # training amplifies rounding
            other = 2 if options.get("batch_size", "auto") == "auto" else "auto"
            same(result, call(model, text, **(options | {"batch_size": other})))
        if case["page"]:
            drawn(dataclasses.replace(result, command="interp <b id=hostile>"))
        return f"{case['analyzer']} result"


def generated(
    strategy: st.SearchStrategy[dict[str, Any]], count: int, of: int, run: Callable[[Any], None]
) -> None:
    """Run `count` generated cases of a seed."""

    @seed(of)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],  # type: ignore[list-item]
    )
    @given(strategy)
    def every(case: dict[str, Any]) -> None:
        run(case)

    every()


def part(of: int, count: int, show: str | None) -> int:
    """The cases of one seed, in this process; the number of failures."""
    runner = Runner(of, show)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")

    began = time.perf_counter()
    for name, share in SHARES.items():
        generated(cases(name), -(-share * count // sum(SHARES.values())), of, runner.case)
    came = ", ".join(f"{n} {what}" for what, n in runner.came.most_common())
    seconds = time.perf_counter() - began
    print(f"seed {of}: {sum(runner.came.values())} cases in {seconds:.0f} s: {came}", flush=True)
    for reason, n in runner.reasons.most_common(12):
        print(f"  refused {n} times: {reason}")
    for failure in runner.failures:
        print(f"\nWRONG (seed {of}):\n{failure}".encode("ascii", "backslashreplace").decode())
    return len(runner.failures)


def main() -> int:
    """Split the cases over processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first process")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with its own seed")
    parser.add_argument("--show", help="tell the cases whose refusal contains this; with --jobs 1")
    given_ = parser.parse_args()
    each = -(-given_.cases // given_.jobs)
    if given_.jobs == 1:
        return int(part(given_.seed, each, given_.show) > 0)
    command = [sys.executable, "-m", "tests.fuzz", "--jobs", "1", "--cases", str(each), "--seed"]
    started = [subprocess.Popen([*command, str(given_.seed + i)]) for i in range(given_.jobs)]
    return int(sum(process.wait() for process in started) > 0)


if __name__ == "__main__":
    sys.exit(main())
