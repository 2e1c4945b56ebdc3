"""Real graphs for tests of the compile key: what jax lowers to on the CPU, as HLO protobuf and as StableHLO.

Run as a program, `python graphs.py FOLDER [PROGRAM...]`, since collectives need eight host devices and XLA reads
XLA_FLAGS once: a test process must not carry that variable, it is a factor of the key. Writes for each program
NAME.hlo.pb, NAME.mlir (text with locations) and NAME.mlirbc.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Program = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def generate(folder: Path, *programs: str) -> None:
    """Write the corpus, or the named programs of it, into `folder` from a fresh process."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = {
        **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    subprocess.run([sys.executable, __file__, str(folder), *programs], check=True, env=environ, timeout=170)


def _plain(jax: Any, jnp: Any) -> dict[str, Program]:
    lax = jax.lax
    f32 = jnp.zeros((4, 8), jnp.float32)
    square = jnp.zeros((4, 4), jnp.float32)
    image = jnp.zeros((2, 8, 8, 3), jnp.float32)
    kernel = jnp.zeros((3, 3, 3, 4), jnp.float32)
    ints = jnp.zeros((8,), jnp.int32)

    def conv(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loop(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))

    def pool(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def mlp(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.gelu(x @ w + b)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w) - 0.25) ** 2)

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * 0.125
        mask = jnp.tril(jnp.ones((16, 16), bool))
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)

    heads = jnp.zeros((1, 2, 16, 8), jnp.float32)
    table = jnp.asarray([[0.5, -1.25, 3.0, 1e-7]] * 4, jnp.float32) + jnp.arange(4, dtype=jnp.float32)[:, None]
    return {
        "matmul": (lambda a, b: a @ b, (f32, f32.T), {}),
        "matmul_bf16": (lambda a, b: a @ b, (f32.astype(jnp.bfloat16), f32.T.astype(jnp.bfloat16)), {}),
        "matmul_highest": (lambda a, b: jnp.dot(a, b, precision="highest"), (f32, f32.T), {}),
        "batched": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (f32.reshape(2, 4, 4), f32.reshape(2, 4, 4)), {}),
        "conv": (conv, (image, kernel), {}),
        "conv_grad": (jax.grad(lambda k, x: conv(x, k).sum()), (kernel, image), {}),
        "scan": (lambda x: lax.scan(lambda c, y: (c + y, c * y), x[0], x), (f32,), {}),
        "while": (loop, (f32,), {}),
        "fori": (lambda x: lax.fori_loop(0, 7, lambda i, c: c + i, x), (f32,), {}),
        "cond": (lambda p, x: lax.cond(p, lambda y: y + 1.0, lambda y: y * 2.0, x), (True, f32), {}),
        "switch": (lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh], x), (1, f32), {}),
        "sort": (jnp.sort, (f32,), {}),
        "argsort": (lambda x: jnp.argsort(x, stable=True), (f32,), {}),
        "top_k": (lambda x: lax.top_k(x, 3), (f32,), {}),
        "reduce_window": (pool, (image,), {}),
        "select_and_scatter": (jax.grad(lambda x: pool(x).sum()), (image,), {}),
        "cumsum": (lambda x: jnp.cumsum(x, axis=1), (f32,), {}),
        "gather": (lambda x, i: x[i], (f32, jnp.zeros((3,), jnp.int32)), {}),
        "scatter": (lambda x, i: x.at[i].add(2.0), (f32, jnp.zeros((3,), jnp.int32)), {}),
        "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 4)), (f32, 1), {}),
        "dynamic_update": (lambda x, i: lax.dynamic_update_slice(x, jnp.ones((1, 8)), (i, 0)), (f32, 1), {}),
        "pad": (lambda x: jnp.pad(x, ((1, 2), (0, 3)), constant_values=0.5), (f32,), {}),
        "concatenate": (lambda a, b: jnp.concatenate([a, b], axis=1), (f32, square), {}),
        "transpose": (lambda x: jnp.transpose(x.reshape(2, 2, 8), (2, 0, 1)), (f32,), {}),
        "fft": (lambda x: jnp.fft.rfft(x, axis=1).real, (f32,), {}),
        "cholesky": (jnp.linalg.cholesky, (square + jnp.eye(4),), {}),
        "triangular": (
            lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True),
            (square + jnp.eye(4), square),
            {},
        ),
        "random": (lambda key: jax.random.normal(key, (4, 4)), (jax.random.key(7),), {}),
        "integers": (lambda x: (x << 3) ^ (x // 5) | ~x, (ints,), {}),
        "compare": (lambda a, b: jnp.where(a > b, a, -b), (f32, f32), {}),
        "constants": (lambda x: x + table, (square,), {}),
        "large_constant": (lambda x: x * jnp.arange(512, dtype=jnp.float32), (jnp.zeros((512,)),), {}),
        "complex": (lambda x: jnp.abs(x * (1.5 + 0.5j)), (f32,), {}),
        "float8": (lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), (f32,), {}),
        "mlp": (mlp, (f32, jnp.zeros((8, 6)), jnp.zeros((6,))), {}),
        "mlp_grad": (jax.value_and_grad(loss), (jnp.zeros((8, 6)), f32), {}),
        "layer_norm": (
            lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
            (f32,),
            {},
        ),
        "attention": (attention, (heads, heads, heads), {}),
        "donation": (lambda x, y: (x + y, y * 2.0), (f32, f32), {"donate_argnums": (0,)}),
        "unused_argument": (lambda x, y: x * 3.0, (f32, f32), {"keep_unused": True}),
        "custom_call": (lambda x: _custom_call(jax, jnp, x), (f32,), {}),
        "nested": (lambda x: jax.jit(lambda y: y * 2)(x) + jax.jit(lambda y: y - 1)(x), (f32,), {}),
    }


def _custom_call(jax: Any, jnp: Any, x: Any) -> Any:
    call = jax.ffi.ffi_call(
        "AwsNeuronCustomNativeKernel",
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        custom_call_api_version=2,
        legacy_backend_config="eyJncmlkIjogWzEsIDJdfQ==",
    )
    return call(x)


def _collectives(jax: Any, jnp: Any) -> dict[str, Program]:
    lax, shard = jax.lax, jax.sharding.PartitionSpec
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    grid = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jnp.zeros((8, 8), jnp.float32)
    split, whole = shard("x"), shard()

    def over(body: Callable[..., Any], out: Any = split, on: Any = mesh, spec: Any = split) -> Program:
        return jax.shard_map(body, mesh=on, in_specs=spec, out_specs=out, check_vma=False), (rows,), {}

    ring = [(i, (i + 1) % 8) for i in range(8)]
    return {
        "all_reduce": over(lambda x: lax.psum(x, "x"), whole),
        "all_reduce_max": over(lambda x: lax.pmax(x, "x"), whole),
        "all_reduce_groups": over(lambda x: lax.psum(x, "b"), shard("a"), grid, shard("a", "b")),
        "all_gather": over(lambda x: lax.all_gather(x, "x", tiled=True), whole),
        "reduce_scatter": over(lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)),
        "all_to_all": over(lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True)),
        "permute": over(lambda x: lax.ppermute(x, "x", ring)),
        "axis_index": over(lambda x: x + lax.axis_index("x")),
        "sharded_matmul": (
            lambda a, b: a @ b,
            (rows, rows),
            {"in_shardings": (jax.NamedSharding(mesh, shard("x")), jax.NamedSharding(mesh, shard()))},
        ),
    }


def _write(folder: Path, wanted: list[str]) -> None:
    import jax
    import jax.numpy as jnp

    programs = {**_plain(jax, jnp), **_collectives(jax, jnp)}
    # With Shardy only jaxlib could read the modules; the other two bindings must have something to agree on.
    jax.config.update("jax_use_shardy_partitioner", False)
    for name, (function, arguments, options) in programs.items():
        if wanted and name not in wanted:
            continue
        lowered = jax.jit(function, **options).lower(*arguments)
        (folder / f"{name}.hlo.pb").write_bytes(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
        module = lowered.compiler_ir("stablehlo")
        (folder / f"{name}.mlir").write_text(module.operation.get_asm(enable_debug_info=True))
        bytecode = io.BytesIO()
        module.operation.write_bytecode(bytecode)
        (folder / f"{name}.mlirbc").write_bytes(bytecode.getvalue())


if __name__ == "__main__":
    _write(Path(sys.argv[1]), sys.argv[2:])
