"""`torch.compile(backend="neuron")` without Trainium: right numbers, clear refusals, one folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from neffcache_hook.cpu import backend, models
from neffcache_hook.cpu.errors import CpuToolchainError, NeffNotRunnable
from neffcache_hook.cpu.runtime import Program
from support.cpu import Toolchain
from support.neffs import make_neff
from torch import Tensor, nn


@pytest.fixture
def toolchain(tmp_path: Path, clean_environment: None) -> Toolchain:
    torch._dynamo.reset()
    backend.graph_log.clear()
    return Toolchain(tmp_path)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="neuron", dynamic=False)


@pytest.mark.parametrize(("name", "graphs"), [("mlp", 1), ("convnet", 1), ("decoder", 1), ("decoder-train", 2)])
def test_models_give_eagers_numbers(toolchain: Toolchain, name: str, graphs: int) -> None:
    case = models.MODELS[name]
    eager = models.run(case, None)
    assert models.max_abs_diff(eager, models.run(case, "neuron")) < 1e-5
    assert toolchain.compiles == len(toolchain.neffs()) == len(backend.graph_log) == graphs
    torch._dynamo.reset()
    assert models.max_abs_diff(eager, models.run(case, "neuron")) < 1e-5
    assert toolchain.compiles == graphs, "a warm folder answers, the compiler is not called"
    assert [g.from_folder for g in backend.graph_log] == [False] * graphs + [True] * graphs


def test_a_training_step_of_a_small_module(toolchain: Toolchain) -> None:
    module, (x,) = models.MODELS["mlp"].build()
    compiled(module)(x).square().mean().backward()
    got = [p.grad for p in module.parameters()]
    module.zero_grad()
    module(x).square().mean().backward()
    for a, p in zip(got, module.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)
    assert toolchain.compiles == 2


def test_integers_booleans_halves_and_scalars(toolchain: Toolchain) -> None:
    def f(i: Tensor, j: Tensor, h: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return i + 1, i > 2, j.to(torch.int32) * 2, h * 2, h.float() + s, (s * 2).double(), i.sum()

    inputs = (torch.arange(6), torch.arange(6, dtype=torch.uint8), torch.arange(6).bfloat16(), torch.tensor(1.5))
    for got, want in zip(compiled(f)(*inputs), f(*inputs), strict=True):
        torch.testing.assert_close(got, want)


class Counter(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        return x * self.seen


def test_mutated_buffers_and_inputs_are_written_back(toolchain: Toolchain) -> None:
    module = Counter()
    call, x = compiled(module), torch.ones(4)
    assert torch.equal(call(x), x * 4)
    assert torch.equal(call(x), x * 8)
    assert module.seen.item() == 8
    y = torch.zeros(3)
    compiled(lambda t: t.add_(1))(y)
    assert y.tolist() == [1.0, 1.0, 1.0]


def test_outputs_that_are_none_inputs_or_constants(toolchain: Toolchain) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    same, nothing, three, plus, part = compiled(lambda t: (t, None, 3, t + 1, t[:1]))(x)
    assert same is x
    assert (nothing, three) == (None, 3)
    assert torch.equal(plus, x + 1)
    assert torch.equal(part, x[:1])
    assert torch.equal(compiled(lambda t: (None, t.t()))(x)[1], x.t())


def test_outputs_have_eagers_strides(toolchain: Toolchain) -> None:
    x = torch.randn(2, 3)
    assert compiled(lambda t: t.t() * 2)(x).stride() == (x.t() * 2).stride() == (1, 3)


def test_attention_with_its_backward(toolchain: Toolchain) -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    f = lambda t: nn.functional.scaled_dot_product_attention(t, t, t, is_causal=True).sum()  # noqa: E731
    (want,) = torch.autograd.grad(f(q), q)
    (got,) = torch.autograd.grad(compiled(f)(q), q)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.fft.fft(x).real, "cannot lower aten._fft_r2c"),
        (lambda x: torch.linalg.svd(x)[1], "cannot lower aten._linalg_svd"),
        (lambda x: x + torch.randn(4, 4), "cannot lower aten.randn.default"),
        (lambda x: nn.functional.dropout(x, 0.5), "set its probability to 0"),
        (lambda x: x[:0] * 2, "cannot lower stablehlo.slice"),
    ],
)
def test_what_cannot_be_lowered_is_named_with_its_line(
    toolchain: Toolchain, function: Callable[..., Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match="the CPU stand-in cannot lower") as caught:
        compiled(function)(torch.ones(4, 4))
    assert words in str(caught.value)
    assert f"{__file__}:" in str(caught.value)
    assert len(str(caught.value)) < 600
    assert capfd.readouterr().err == ""
    assert toolchain.compiles == 0


def test_dynamic_shapes_are_refused_with_the_way_out(toolchain: Toolchain) -> None:
    call = torch.compile(lambda x: x + 1, backend="neuron", dynamic=True)
    with pytest.raises(Exception, match="dynamic=False"):
        call(torch.ones(5))


def test_a_damaged_neff_in_the_folder_is_compiled_again(toolchain: Toolchain) -> None:
    call = compiled(lambda t: t + 1)
    call(torch.ones(3))
    (neff,) = toolchain.neffs()
    neff.write_bytes(neff.read_bytes()[:-1])
    torch._dynamo.reset()
    assert call(torch.ones(3)).tolist() == [2, 2, 2]
    assert toolchain.compiles == 2
    Program(str(neff))


def test_another_compilers_neff_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "real.neff"
    path.write_bytes(make_neff())
    with pytest.raises(NeffNotRunnable, match="not made by the CPU stand-in"):
        Program(str(path))


SCRIPT = """
import os, sys
import torch
from neffcache_hook.cpu import backend

def f(x):
    return torch.relu(x @ x) + 1

torch.compile(f, backend="neuron", dynamic=False)(torch.ones(4, 4))
record = backend.graph_log[0]
print(record.key, record.op_digest, record.from_folder)
"""


def test_bytes_are_equal_between_processes_and_moved_by_the_checkout(toolchain: Toolchain, tmp_path: Path) -> None:
    """UC: the same graph from another checkout misses the vendor's folder, though nothing but a path differs."""
    here, there = tmp_path / "one" / "train.py", tmp_path / "two" / "train.py"
    for script in (here, there):
        script.parent.mkdir()
        script.write_text(SCRIPT)
    runs = [toolchain.python(script) for script in (here, here, there)]
    assert [r.stderr for r in runs] == ["", "", ""], "nothing is printed at exit"
    first, again, moved = (r.stdout.split() for r in runs)
    assert again == [first[0], first[1], "True"]
    assert moved[0] != first[0]
    assert moved[1:] == [first[1], "False"]
    one, two = toolchain.neffs()
    assert one.read_bytes() == two.read_bytes(), "the artifacts are equal: only the vendor's key differs"


FORKED = """
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import torch
torch.set_num_threads(1)
from neffcache_hook.cpu import backend, models

backend.preload()
threads = len(os.listdir("/proc/self/task"))
case = models.MODELS["mlp"]
eager = models.run(case, None)
if sys.argv[1] == "ran":
    module, inputs = case.build()
    inherited = torch.compile(module, backend="neuron", dynamic=False)
    with torch.no_grad():
        inherited(*inputs)
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        assert models.max_abs_diff(eager, models.run(case, "neuron")) < 1e-5
        if sys.argv[1] == "ran":
            with torch.no_grad():
                assert models.max_abs_diff(eager, [inherited(*inputs)]) < 1e-5
        sys.exit(0)
    children.append(child)
print(threads, [os.waitpid(c, 0)[1] for c in children])
"""


@pytest.mark.parametrize("parent", ["imported", "ran"])
def test_ranks_are_forked_from_one_process(toolchain: Toolchain, tmp_path: Path, parent: str) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(FORKED)
    done = toolchain.python(script, parent)
    assert (done.stdout, done.stderr) == ("1 [0, 0]\n", "")
    assert toolchain.compiles == 1


class _VendorPoint:
    value = "torch_neuronx.somewhere:backend"

    @staticmethod
    def load() -> Callable[..., Any]:
        return lambda gm, _inputs, **_options: lambda *_args: (torch.full((1,), 42.0),)


class _OwnPoint(_VendorPoint):
    value = "neffcache_hook.cpu.backend:neuron"


@pytest.mark.parametrize("points", [[_OwnPoint(), _VendorPoint()], [_OwnPoint()]])
def test_torch_neuronx_goes_first_where_it_is_installed(
    toolchain: Toolchain, points: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: find("json") if n == "torch_neuronx" else find(n, *a)
    )
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_kw: points)
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    if len(points) == 2:
        (out,) = backend.neuron(graph, [torch.ones(1)])(torch.ones(1))
        assert out.item() == 42
    else:
        with pytest.raises(CpuToolchainError, match="stays out of the way"):
            backend.neuron(graph, [torch.ones(1)])
    assert toolchain.compiles == 0


def test_the_backend_is_registered_by_name() -> None:
    assert "neuron" in torch._dynamo.list_backends()
