import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colloid.training import logprob
from colloid.training.logprob import token_log_probs


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a small vocabulary takes several blocks, the last of them uneven."""
    monkeypatch.setattr(logprob, "CPU_BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(logprob, "CPU_CHUNK_TOKENS", 4)


def make_head(tokens=11, hidden=6, vocab=50, dtype=torch.float64, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = (scale * torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)).to(dtype)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return states.requires_grad_(), weight.requires_grad_(), targets


def dense(hidden, weight, targets, temperature):
    """The float64 formula, with the whole table of logits."""
    log_probs = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    return log_probs.gather(1, targets[:, None]).squeeze(1), -(log_probs.exp() * log_probs).sum(1)


def upstream(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, generator=generator, dtype=torch.float64)


def gradients(log_probs, entropies, leaves, upstream_grads):
    total = (log_probs * upstream_grads[0]).sum()
    if entropies is not None:
        total = total + (entropies * upstream_grads[1]).sum()
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("chunk_tokens", [-1, 1, 3, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_the_dense_formula(temperature, chunk_tokens, with_entropy):
    hidden, weight, targets = make_head()
    log_probs, entropies = token_log_probs(
        hidden, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens, with_entropy=with_entropy
    )
    expected_log_probs, expected_entropies = dense(hidden, weight, targets, temperature)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-12, atol=1e-12)
    if with_entropy:
        torch.testing.assert_close(entropies, expected_entropies, rtol=1e-12, atol=1e-12)
    else:
        assert entropies is None
        expected_entropies = None
    ours = gradients(log_probs, entropies, (hidden, weight), upstream(11))
    theirs = gradients(expected_log_probs, expected_entropies, (hidden, weight), upstream(11))
    for our_grad, their_grad in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our_grad, their_grad, rtol=1e-11, atol=1e-12)


def test_gradients_pass_the_numerical_check():
    hidden, weight, targets = make_head(tokens=3, hidden=4, vocab=20)

    def both(hidden, weight):
        return token_log_probs(hidden, weight, targets, temperature=0.7, with_entropy=True)

    assert torch.autograd.gradcheck(both, (hidden, weight))


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_nobody_uses_gets_no_gradient(used):
    hidden, weight, targets = make_head()
    ours = token_log_probs(hidden, weight, targets, temperature=0.7, with_entropy=True)[used].sum()
    theirs = dense(hidden, weight, targets, 0.7)[used].sum()
    for our_grad, their_grad in zip(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(our_grad, their_grad)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen):
    hidden, weight, targets = make_head()
    expected = torch.autograd.grad(dense(hidden, weight, targets, 1.0)[0].sum(), (hidden, weight))
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    token_log_probs(hidden, weight, targets, temperature=1.0)[0].sum().backward()
    for leaf, grad in zip((hidden, weight), expected, strict=True):
        assert (leaf.grad is None) == (not leaf.requires_grad)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, grad)


@pytest.mark.parametrize(("dtype", "grad_error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_low_precision_inputs_get_a_float32_softmax(dtype, grad_error):
    hidden, weight, targets = make_head(tokens=9, hidden=32, vocab=200, dtype=dtype, scale=5.0)
    log_probs, entropies = token_log_probs(hidden, weight, targets, temperature=0.7, with_entropy=True)
    assert log_probs.dtype == entropies.dtype == torch.float32
    expected = dense(hidden, weight, targets, 0.7)
    assert expected[0].min() < -20
    log_prob_error = 1e-6 * (hidden.double() @ weight.double().t() / 0.7).abs().max().item()
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=0, atol=log_prob_error)
    torch.testing.assert_close(entropies.double(), expected[1], rtol=0, atol=log_prob_error)
    ours = gradients(log_probs, entropies, (hidden, weight), upstream(9))
    theirs = gradients(*expected, (hidden, weight), upstream(9))
    for our_grad, their_grad in zip(ours, theirs, strict=True):
        assert our_grad.dtype == dtype
        assert (our_grad - their_grad).abs().max() <= grad_error * their_grad.abs().max()


def test_huge_logits_stay_finite_and_no_log_prob_is_positive():
    hidden, weight, targets = make_head(dtype=torch.float32, scale=1e4)
    targets = (hidden @ weight.t()).argmax(1)
    log_probs, entropies = token_log_probs(hidden, weight, targets, temperature=0.5, with_entropy=True)
    assert (log_probs <= 0).all() and log_probs.isfinite().all() and (entropies.abs() < 1e-3).all()
    assert all(grad.isfinite().all() for grad in gradients(log_probs, entropies, (hidden, weight), upstream(11)))


def test_the_result_for_a_token_does_not_depend_on_the_chunks():
    hidden, weight, targets = make_head(dtype=torch.float32)
    one = token_log_probs(hidden, weight, targets, temperature=0.7, chunk_tokens=100, with_entropy=True)
    many = token_log_probs(hidden, weight, targets, temperature=0.7, chunk_tokens=2, with_entropy=True)
    for left, right in zip(one, many, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


def test_padding_rows_take_no_part():
    hidden, weight, targets = make_head(vocab=50)
    targets = targets % 37
    with torch.no_grad():
        weight[37:] = 1e3
    log_probs, entropies = token_log_probs(hidden, weight, targets, temperature=0.7, with_entropy=True, vocab_size=37)
    cut = weight[:37]
    expected = dense(hidden, cut, targets, 0.7)
    torch.testing.assert_close(log_probs, expected[0])
    torch.testing.assert_close(entropies, expected[1])
    ours = gradients(log_probs, entropies, (hidden, weight), upstream(11))
    theirs = gradients(*expected, (hidden, weight), upstream(11))
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1])
    assert not ours[1][37:].any()


def test_no_tokens_give_no_log_probs_and_zero_gradients():
    hidden, weight, targets = make_head(tokens=0)
    log_probs, entropies = token_log_probs(hidden, weight, targets, temperature=1.0, with_entropy=True)
    assert log_probs.shape == entropies.shape == (0,)
    (log_probs.sum() + entropies.sum()).backward()
    assert hidden.grad.shape == (0, 6) and not weight.grad.any()


def test_a_temperature_of_zero_is_an_error():
    with pytest.raises(ValueError, match=r"temperature of log-probs is 0\.0; it must be above 0"):
        token_log_probs(*make_head(), temperature=0.0)


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any tensor that an operation makes or writes to."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tensor_of_tokens_by_vocabulary_is_ever_made(monkeypatch, with_entropy):
    monkeypatch.undo()
    tokens, hidden_size, vocab = 2048, 8, 4096
    hidden, weight, targets = make_head(tokens, hidden_size, vocab, dtype=torch.float32)
    with LargestTensor() as largest:
        log_probs, entropies = token_log_probs(hidden, weight, targets, temperature=1.0, with_entropy=with_entropy)
        gradients(log_probs, entropies, (hidden, weight), upstream(tokens).float())
    assert largest.elements <= logprob.CPU_BLOCK_ELEMENTS < tokens * vocab / 10
    with LargestTensor() as largest:
        dense(hidden, weight, targets, 1.0)
    assert largest.elements == tokens * vocab
