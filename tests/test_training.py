"""What a user does next: train with another batch size, and beside other threads."""

import copy
import threading

import pytest
import torch
from models import BothModel, Scale, operators


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_training_with_a_dynamic_batch_equals_eager(strict):
    torch.manual_seed(0)
    model = BothModel()
    eager = copy.deepcopy(model)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    ep = torch.export.export(model, (torch.randn(4, 3),), dynamic_shapes=shapes, strict=strict)
    captured = ep.module()
    runs = [(m, torch.optim.Adam(m.parameters())) for m in (captured, eager)]
    for seed, batch in enumerate((2, 7, 33, 64)):
        x = torch.randn(batch, 3)
        for module, optimizer in runs:
            torch.manual_seed(seed)
            optimizer.zero_grad()
            module(x).pow(2).mean().backward()
            optimizer.step()
    want = dict(eager.named_parameters())
    for name, parameter in captured.named_parameters():
        torch.testing.assert_close(parameter, want[name])


def test_other_threads_train_in_eager_while_one_captures():
    errors = []

    def train():
        model, x = BothModel(), torch.randn(3, 3, requires_grad=True)
        for _ in range(100):
            model(x).sum().backward()
            node = Scale.apply(x, model.weight).grad_fn
            assert type(node).__name__ == "ScaleBackward"

    def capture():
        for _ in range(3):
            ep = torch.export.export(BothModel(), (torch.randn(2, 3),), strict=False)
            assert len(operators(ep.graph_module)) == 3

    def watched(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=watched, args=(w,)) for w in (train, capture, train)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
