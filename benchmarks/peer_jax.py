"""jax and jax-privacy as a peer: run by `peers.py` with the interpreter of an environment that has both.

jax* is plain SGD under jit, jax-privacy is `clipped_grad` with Gaussian noise under jit, one thread each, compiled once
before it is timed. jax-privacy's default forms all per-sample gradients at once, which was never the fastest here; it
gets the fastest of micro-batches of 1, 16 and 64 records (256 and 1024 for large batches), found by a trial. Weights of
linear layers are (in, out), the layout that is usual there. The noise comes from jax' own generator.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
from jax import lax
from jax_privacy import clipping

Params = list[jax.Array]
Step = Callable[[Params, jax.Array], tuple[Params, jax.Array]]
MICRO_BATCHES, LARGE_BATCH = {False: (1, 16, 64), True: (256, 1024)}, 1000
TRIAL_SECONDS = 0.05


def transposed(weight: Any) -> Any:
    """Returns the weight of a linear layer in the other layout: (in, out) here, (out, in) in torch."""
    return weight.T if weight.ndim == 2 else weight


def dense(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ weight + bias


def mlp(p: Params, x: jax.Array) -> jax.Array:
    for k in range(0, len(p) - 2, 2):
        x = jax.nn.relu(dense(x, p[k], p[k + 1]))
    return dense(x, p[-2], p[-1])


def cnn(p: Params, x: jax.Array) -> jax.Array:
    for k, pad in ((0, 3), (2, 0)):
        x = lax.conv_general_dilated(
            x, p[k], (2, 2), [(pad, pad)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        x = jax.nn.relu(x + p[k + 1][:, None, None])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")
    return mlp(p[4:], x.reshape(len(x), -1))


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    return (
        centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5) * weight + bias
    )


def transformer(p: Params, x: jax.Array, heads: int = 4) -> jax.Array:
    size, length, width = x.shape
    qkv = dense(layer_norm(x, p[0], p[1]), p[4], p[5]).reshape(
        size, length, 3, heads, width // heads
    )
    query, key, value = jnp.moveaxis(qkv, (2, 3), (0, 2))
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) / (width // heads) ** 0.5
    mixed = jnp.moveaxis(jax.nn.softmax(scores) @ value, 1, 2).reshape(size, length, width)
    x = x + dense(mixed, p[6], p[7])
    x = x + dense(
        jax.nn.gelu(dense(layer_norm(x, p[2], p[3]), p[8], p[9]), approximate=False),
        p[10],
        p[11],
    )
    return dense(x.mean(1), p[12], p[13])


MODELS = {"logistic": mlp, "softmax": mlp, "MLP": mlp, "CNN": cnn, "transformer": transformer}


def loss_of(case: str) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    model = MODELS[case.split()[0]]

    def loss(p: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        scores = model(p, x)
        if scores.shape[-1] == 1:
            return jnp.mean(jax.nn.softplus(scores) - y * scores)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1))

    return loss


class Run:
    """A compiled step of a variant, with its parameters and batch."""

    def __init__(self, case: str, variant: str, path: str, setting: dict[str, float]) -> None:
        with np.load(path) as arrays:
            self.start = [
                transposed(jnp.asarray(arrays[f"p{k}"])) for k in range(len(arrays) - 2)
            ]
            self.batch = jnp.asarray(arrays["inputs"]), jnp.asarray(arrays["targets"])
        self.setting, self.key = setting, jax.random.key(0)
        self.params = self.start
        loss = loss_of(case)
        if variant == "jax*":
            self.step = self._jit(jax.grad(loss), noise=0.0)
            return
        size = len(self.batch[0])
        sizes = [m for m in MICRO_BATCHES[size > LARGE_BATCH] if size % m == 0]
        if not setting["noise_multiplier"]:
            del sizes[1:]  # it is the update that is asked for, not the time
        trials = []
        for micro in sizes:
            grad = clipping.clipped_grad(
                loss,
                l2_clip_norm=setting["clip"],
                batch_argnums=(1, 2),
                normalize_by=size,
                microbatch_size=micro,
            )
            step = self._jit(grad, noise=setting["noise_multiplier"] * setting["clip"] / size)
            repeats = max(1, int(TRIAL_SECONDS / self.seconds(1, step)))
            trials.append((self.seconds(repeats, step), step))
        self.step = min(trials, key=lambda trial: trial[0])[1]

    def _jit(self, grad: Callable[..., Any], noise: float) -> Step:
        lr = self.setting["lr"]

        @jax.jit
        def step(
            params: Params, key: jax.Array, x: jax.Array, y: jax.Array
        ) -> tuple[Params, jax.Array]:
            mean = grad(params, x, y)
            key, *keys = jax.random.split(key, len(params) + 1)
            if noise:
                mean = [
                    g + noise * jax.random.normal(k, g.shape)
                    for g, k in zip(mean, keys, strict=True)
                ]
            return [p - lr * g for p, g in zip(params, mean, strict=True)], key

        return lambda params, key: step(params, key, *self.batch)

    def seconds(self, repeats: int, step: Step | None = None) -> float:
        """Returns CPU seconds of a step."""
        step = step or self.step
        jax.block_until_ready(step(self.params, self.key))  # compiles; warms caches
        start = time.process_time()
        for _ in range(repeats):
            self.params, self.key = step(self.params, self.key)
        jax.block_until_ready(self.params)
        return (time.process_time() - start) / repeats

    def update(self) -> np.ndarray:
        """Returns (before - after) / lr, flat, in torch's layout."""
        after, _ = self.step(self.start, self.key)
        moves = [
            np.asarray(p, np.float64) - np.asarray(q, np.float64)
            for p, q in zip(self.start, after, strict=True)
        ]
        return np.concatenate([transposed(move).ravel() for move in moves]) / self.setting["lr"]


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    runs: dict[tuple[str, str], Run] = {}

    def answer(**found: object) -> None:
        print(json.dumps(found), file=out, flush=True)

    answer(versions=f"jax {jax.__version__}, jax-privacy {jax_privacy.__version__}")
    for line in sys.stdin:
        request = json.loads(line)
        key = request["case"], request["variant"]
        if request["do"] == "prepare":
            if any(case != key[0] for case, _ in runs):
                runs.clear()  # one case at a time is held
            runs[key] = Run(*key, request["path"], request["setting"])
            answer()
        elif request["do"] == "time":
            answer(seconds=runs[key].seconds(request["repeats"]))
        else:
            np.save(request["path"], runs[key].update())
            answer()


if __name__ == "__main__":
    main()
