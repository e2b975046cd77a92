"""Several threads capture at once, while others train."""

import copy
import threading

import torch
from models import BothModel, assert_same, gradients, operators
from torch.fx.experimental.proxy_tensor import make_fx

from hops import _threads

ROUNDS = 4


def captured(model, x, how):
    if how == "make_fx":
        parameters = dict(model.named_parameters())
        call = lambda p, x: torch.func.functional_call(model, p, (x,))
        graph = make_fx(call, pre_dispatch=True)(parameters, x)
        return graph, lambda v: graph(parameters, v)
    program = torch.export.export(model, (x,), strict=how == "strict")
    return program.graph_module, program.module()


def run_threads(*works):
    errors = []

    def watched(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=watched, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "two captures wait for each other"
    for error in errors:
        raise error


def test_threads_that_capture_at_once_each_get_their_own_graph():
    torch.manual_seed(0)
    ready = threading.Barrier(3)
    results = []

    def capture(how):
        try:
            for number in range(ROUNDS):
                model = BothModel()
                x = torch.randn(number + 2, 3)
                ready.wait(300)
                results.append((how, model, x, *captured(model, x, how)))
        except BaseException:
            ready.abort()
            raise

    def train():
        model, x = BothModel(), torch.randn(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(60):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    works = [lambda how=how: capture(how) for how in ("nonstrict", "strict", "make_fx")]
    run_threads(*works, train)
    assert len(results) == 3 * ROUNDS
    for how, model, x, graph, replay in results:
        assert len(operators(graph)) == 3, how
        eager = copy.deepcopy(model)
        if how == "make_fx":
            torch.manual_seed(0)
            got = replay(x)
            torch.testing.assert_close(got, gradients(eager, x)[0])
        else:
            assert_same(gradients(replay, x), gradients(eager, x))


def test_a_capture_waits_for_one_on_another_thread():
    inside, leave = threading.Event(), threading.Event()
    order = []

    class Waiting(torch.nn.Module):
        def forward(self, x):
            inside.set()
            leave.wait(60)
            order.append("first")
            return x + 1

    def first():
        make_fx(Waiting(), pre_dispatch=True)(torch.ones(2))

    def second():
        inside.wait(60)
        threading.Timer(0.2, leave.set).start()
        make_fx(lambda x: order.append("second") or x, pre_dispatch=True)(torch.ones(2))

    run_threads(first, second)
    assert order == ["first", "second"]
    assert _threads.captures_on_this_thread() == 0
