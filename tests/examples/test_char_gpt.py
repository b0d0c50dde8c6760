import math
from pydoc_data.topics import topics

import pytest
import torch

from dure import Sum
from examples.char_gpt import EVAL_EVERY, NO_TARGET, CharGPT, alphabet, windows


def small(**options):
    return CharGPT(**{"layers": 2, "heads": 2, "width": 16, "context": 32} | options)


def bits_per_character(task, model, batch):
    with torch.no_grad():
        bits = task.metrics(model, batch)["bits_per_character"]
    return float(bits.total / bits.count)


def test_char_gpt_windows_make_every_character_but_the_first_a_target_once():
    documents = ["abcdefghij", "import"]
    data = windows(documents, context=4)
    inputs, targets = data.tensors
    letters = {number: letter for letter, number in alphabet().items()}
    assert "".join(letters[code] for code in targets[targets != NO_TARGET].tolist()) == "bcdefghij" + "mport"
    assert (targets != NO_TARGET).sum(1).tolist() == [4, 4, 1, 4, 1]
    # what is seen at a place is what was the target at the place before it
    assert torch.equal(inputs[:, 1:][targets[:, 1:] != NO_TARGET], targets[:, :-1][targets[:, 1:] != NO_TARGET])


def test_char_gpt_splits_by_topic_and_uses_every_character():
    train, held_out = small().train_data(), small().eval_data()
    counts = [int((data.tensors[1] != NO_TARGET).sum()) for data in (train, held_out)]
    sizes = [len(topics[name]) - 1 for name in sorted(topics)]
    assert counts[1] == sum(sizes[::EVAL_EVERY])
    assert sum(counts) == sum(sizes)


def test_char_gpt_loss_is_a_sum_over_characters_with_their_number():
    task = small()
    model, data = task.build_model(), task.train_data()
    ragged = int((data.tensors[1] == NO_TARGET).any(1).nonzero()[0])
    rows = [ragged - 1, ragged]
    whole = task.loss(model, data.__getitems__(rows))
    parts = [task.loss(model, data.__getitems__([row])) for row in rows]
    assert isinstance(whole, Sum)
    assert int(whole.count) == sum(int(part.count) for part in parts) < 64
    torch.testing.assert_close(whole.total, parts[0].total + parts[1].total)


def test_char_gpt_untrained_is_as_uncertain_as_its_alphabet():
    task = small()
    bits = bits_per_character(task, task.build_model(), task.eval_data().__getitems__(range(50)))
    assert bits == pytest.approx(math.log2(len(alphabet())), abs=0.1)


def test_char_gpt_sees_no_later_character():
    model = small().build_model().eval()
    characters = torch.randint(0, 50, (2, 32))
    changed = characters.clone()
    changed[:, 20:] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(characters)[:, :20], model(changed)[:, :20])
        assert not torch.allclose(model(characters)[:, 20:], model(changed)[:, 20:])


def test_char_gpt_learns_more_than_how_frequent_characters_are():
    torch.manual_seed(0)
    task = small(layers=1, width=32, learning_rate=1e-2)
    model, data, held_out = task.build_model(), task.train_data(), task.eval_data()
    optimizer = task.build_optimizer(model)
    for step in range(100):
        optimizer.zero_grad()
        loss = task.loss(model, data.__getitems__(range(step, len(data), len(data) // 16)))
        (loss.total / loss.count).backward()
        optimizer.step()
    targets = data.tensors[1]
    frequency = targets[targets != NO_TARGET].bincount() / (targets != NO_TARGET).sum()
    guessing_by_frequency = -(frequency * frequency.clamp(min=1e-9).log2()).sum()
    assert bits_per_character(task, model, held_out.__getitems__(range(len(held_out)))) < guessing_by_frequency - 0.3


def test_char_gpt_ties_input_and_output_and_decays_matrices_only():
    task = small()
    model = task.build_model()
    decayed, others = task.build_optimizer(model).param_groups
    assert model.head.weight is model.embedding.weight
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert others["weight_decay"] == 0
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_char_gpt_schedule_ends_at_a_tenth():
    schedule = small().build_schedule(None, 1000)
    assert 0 < schedule(0) < 0.1
    assert schedule(1000) == pytest.approx(0.1)


def test_char_gpt_of_a_width_that_its_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="width 16 is no multiple of heads 3"):
        small(heads=3).build_model()
