"""The head and its cross-entropy, against closed forms and against torch's own on whole logits."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_pretrain.models import GPT, LossSums, chunked_cross_entropy
from lit_pretrain.specs import GPTConfig

N, C, V, PADDED = 23, 6, 11, 16


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, C, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(PADDED, C, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.tensor([0, 5, 22])] = -100
    return hidden, weight, targets


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight[:V].T
    nll = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
    log_z = torch.logsumexp(logits, dim=-1)[targets != -100]
    return nll, z_loss * log_z.square().sum()


@pytest.mark.parametrize("chunk_size", [1, 7, 23, 100])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.25, 0.0), (0.5, -3.0)])
def test_sums_and_gradients_equal_those_of_whole_logits(
    chunk_size: int, z_loss: float, factors: tuple[float, float]
) -> None:
    hidden, weight, targets = problem()
    nll, z = whole(hidden, weight, targets, z_loss=z_loss)
    expected = torch.autograd.grad(factors[0] * nll + factors[1] * z, (hidden, weight))
    sums = chunked_cross_entropy(hidden, weight, targets, vocab_size=V, z_loss=z_loss, chunk_size=chunk_size)
    got = torch.autograd.grad(factors[0] * sums.nll_sum + factors[1] * sums.z_loss_sum, (hidden, weight))
    torch.testing.assert_close(sums.nll_sum, nll, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums.z_loss_sum, z, rtol=1e-12, atol=1e-12)
    assert sums.num_targets.item() == 20
    assert sums.num_targets.dtype == torch.int64
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_padding_rows_get_a_gradient_of_exactly_zero() -> None:
    hidden, weight, targets = problem()
    sums = chunked_cross_entropy(hidden, weight, targets, vocab_size=V, z_loss=0.1, chunk_size=5)
    (sums.nll_sum + sums.z_loss_sum).backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad[V:], torch.zeros(PADDED - V, C, dtype=torch.float64))
    assert (weight.grad[:V].abs().amax(dim=1) > 0).all()


def test_padding_rows_do_not_change_the_loss() -> None:
    hidden, weight, targets = problem()
    before = chunked_cross_entropy(hidden, weight, targets, vocab_size=V, chunk_size=5)
    with torch.no_grad():
        weight[V:] = 1e3
    after = chunked_cross_entropy(hidden, weight, targets, vocab_size=V, chunk_size=5)
    assert torch.equal(before.nll_sum, after.nll_sum)


def test_hand_computed_sums() -> None:
    # Two tokens with logits (0, 0) and (log 3, 0): -log p = log 2 for either class, then log(4/3) for class 0.
    hidden = torch.tensor([[0.0], [math.log(3.0)], [50.0]])
    weight = torch.tensor([[1.0], [0.0]])
    sums = chunked_cross_entropy(hidden, weight, torch.tensor([1, 0, -100]), vocab_size=2, z_loss=0.5, chunk_size=2)
    assert sums.nll_sum.item() == pytest.approx(math.log(2) + math.log(4 / 3), rel=1e-6)
    # Z is 2 and 4.
    assert sums.z_loss_sum.item() == pytest.approx(0.5 * (math.log(2) ** 2 + math.log(4) ** 2), rel=1e-6)
    assert sums.num_targets.item() == 2


def test_uniform_logits_cost_log_vocabulary() -> None:
    sums = chunked_cross_entropy(
        torch.zeros(9, C), torch.randn(PADDED, C), torch.arange(9), vocab_size=V, z_loss=1.0, chunk_size=4
    )
    assert sums.nll_sum.item() == pytest.approx(9 * math.log(V), rel=1e-6)
    assert sums.z_loss_sum.item() == pytest.approx(9 * math.log(V) ** 2, rel=1e-6)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_without_targets_sums_and_gradients_are_zero(z_loss: float) -> None:
    hidden, weight, targets = problem()
    sums = chunked_cross_entropy(
        hidden, weight, torch.full_like(targets, -100), vocab_size=V, z_loss=z_loss, chunk_size=5
    )
    (sums.nll_sum + sums.z_loss_sum).backward()
    assert [value.item() for value in sums] == [0.0, 0.0, 0]
    assert hidden.grad is not None
    assert weight.grad is not None
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_an_empty_batch_is_all_zero() -> None:
    hidden, weight, _ = problem()
    sums = chunked_cross_entropy(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), vocab_size=V, chunk_size=5)
    sums.nll_sum.backward()
    assert [value.item() for value in sums] == [0.0, 0.0, 0]


def test_huge_logits_stay_finite() -> None:
    hidden = torch.tensor([[3e4], [-3e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    sums = chunked_cross_entropy(hidden, weight, torch.tensor([1, 1]), vocab_size=2, chunk_size=2)
    sums.nll_sum.backward()
    assert sums.nll_sum.item() == 6e4
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("retain", [True, False])
def test_a_second_backward_gives_the_same(retain: bool) -> None:
    hidden, weight, targets = problem()
    sums = chunked_cross_entropy(hidden, weight, targets, vocab_size=V, chunk_size=5)
    first = torch.autograd.grad(sums.nll_sum, weight, retain_graph=True)[0].clone()
    second = torch.autograd.grad(sums.nll_sum, weight, retain_graph=retain)[0]
    assert torch.equal(first, second)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_only_what_needs_a_gradient_gets_one(frozen: str) -> None:
    hidden, weight, targets = problem()
    expected = torch.autograd.grad(whole(hidden, weight, targets, z_loss=0.0)[0], (hidden, weight))
    hidden = hidden.detach().requires_grad_(frozen == "weight")
    weight = weight.detach().requires_grad_(frozen == "hidden")
    sums = chunked_cross_entropy(hidden, weight, targets, vocab_size=V, chunk_size=5)
    assert sums.nll_sum.requires_grad == (frozen != "both")
    if frozen != "both":
        sums.nll_sum.backward()
    assert (hidden.grad is None) == (frozen != "weight")
    assert (weight.grad is None) == (frozen != "hidden")
    for mine, theirs in zip((hidden.grad, weight.grad), expected, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_sum_in_float32(dtype: torch.dtype) -> None:
    hidden, weight, targets = problem()
    low_h, low_w = hidden.detach().to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_()
    exact_h, exact_w = (x.detach().double().requires_grad_() for x in (low_h, low_w))
    nll, _ = whole(exact_h, exact_w, targets, z_loss=0.0)
    nll.backward()
    sums = chunked_cross_entropy(low_h, low_w, targets, vocab_size=V, chunk_size=5)
    sums.nll_sum.backward()
    assert sums.nll_sum.dtype == torch.float32
    # Logits of size up to 8 are rounded to eps/2 relative; the errors of 20 targets are independent.
    tolerance = 8 * torch.finfo(dtype).eps * 20**0.5
    assert abs(sums.nll_sum.item() - nll.item()) < tolerance
    assert low_w.grad is not None
    assert low_w.grad.dtype == dtype
    assert exact_w.grad is not None
    assert (low_w.grad.double() - exact_w.grad).abs().max() < tolerance


def test_under_autocast_weight_gradients_are_float32_sums() -> None:
    hidden, weight, targets = problem()
    h, w = (x.detach().float().requires_grad_() for x in (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = chunked_cross_entropy(h, w, targets, vocab_size=V, chunk_size=5)
    sums.nll_sum.backward()
    assert sums.nll_sum.dtype == torch.float32
    assert w.grad is not None
    assert w.grad.dtype == torch.float32
    nll, _ = whole(hidden, weight, targets, z_loss=0.0)
    exact = sums.nll_sum.item()
    assert exact == pytest.approx(nll.item(), rel=1e-2)
    assert exact != pytest.approx(nll.item(), rel=1e-7)  # it did compute in 16 bits


class _LiveBytes(TorchDispatchMode):
    """Bytes of tensors made inside and still alive: the peak, and the largest single one."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.seen: set[int] = set()

    def _free(self, key: int, size: int) -> None:
        self.live -= size
        self.seen.discard(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                key, size = storage.data_ptr(), storage.nbytes()
                if size and key not in self.seen:
                    self.seen.add(key)
                    self.live += size
                    self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
                    weakref.finalize(storage, self._free, key, size)
        return out


def _peak(chunk_size: int, *, tokens: int) -> tuple[int, int]:
    vocab, width = 4096, 8
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    with _LiveBytes() as memory:
        sums = chunked_cross_entropy(hidden, weight, targets, vocab_size=vocab, chunk_size=chunk_size)
        sums.nll_sum.backward()
    return memory.peak, memory.largest


def test_memory_grows_with_the_chunk_and_not_with_the_batch() -> None:
    row = 4096 * 4  # bytes of one token's float32 logits
    peaks = {chunk: _peak(chunk, tokens=1024) for chunk in (16, 64, 256)}
    for chunk, (peak, largest) in peaks.items():
        assert largest <= max(chunk, 8) * row, f"a tensor of more than {chunk} rows of logits was made"
        # Logits, log-probabilities, and room for two weights, two hidden states and small vectors.
        assert peak <= 3 * chunk * row + 2 * 4096 * 8 * 4 + 4 * 1024 * 8 * 4 + 64 * 1024
    twice = _peak(64, tokens=2048)[0]
    assert twice - peaks[64][0] < 1024 * row / 10, "doubling the batch must not add its logits"


def test_model_loss_equals_that_of_its_own_logits() -> None:
    config = GPTConfig(vocab_size=50, block_size=8, n_layer=1, n_head=2, n_embd=8, z_loss=0.2)
    model = GPT(config, loss_chunk_size=3).double()
    ids = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))
    hidden = model(ids)
    sums = model.loss(hidden, ids)
    logits = model.logits(hidden)
    assert isinstance(sums, LossSums)
    assert logits.shape == (2, 8, 64)
    assert (logits[..., 50:] == float("-inf")).all()
    expected = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
    torch.testing.assert_close(sums.nll_sum, expected, rtol=1e-12, atol=0)
    expected_z = 0.2 * logits.logsumexp(-1).square().sum()
    torch.testing.assert_close(sums.z_loss_sum, expected_z, rtol=1e-12, atol=0)


def test_the_memory_meter_sees_whole_logits() -> None:
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True)
    with _LiveBytes() as memory:
        F.cross_entropy(hidden @ weight.T, torch.zeros(64, dtype=torch.int64)).backward()
    # Log-probabilities are kept while the gradient of the logits is made.
    assert memory.peak >= 2 * 64 * 4096 * 4
