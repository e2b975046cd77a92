"""``python -m hops doctor``."""

from fresh import run

from hops import _doctor, _patches


def rows():
    """Status, native, others of each site, by its name."""
    found = {}
    for line in _doctor.report().splitlines():
        for site in _patches.SITES:
            if line.endswith(" " + site.where):
                found[site.where] = tuple(line.split()[:3])
    return found


def test_every_site_has_a_row_and_none_waits():
    found = rows()
    assert found.keys() == {site.where for site in _patches.SITES}
    for where, (status, native, others) in found.items():
        assert status in ("patched", "native", "absent"), where
        assert native == {"patched": "no", "native": "yes", "absent": "-"}[status], where
        assert others == "no", where


def test_somebody_elses_patch_shows_with_where_it_comes_from(monkeypatch):
    from torch._dynamo.output_graph import OutputGraph

    ours = OutputGraph.call_user_compiler
    monkeypatch.setattr(OutputGraph, "call_user_compiler", lambda *a, **k: ours(*a, **k))
    (where,) = [w for w in rows() if w.startswith("torch._dynamo:")]
    assert rows()[where] == ("patched", "no", "yes")
    assert f"OutputGraph.call_user_compiler after hops, by {__file__}:" in _doctor.report()


def test_a_patch_that_was_there_before_shows():
    printed = run(
        """
        from torch.fx.experimental import proxy_tensor
        stock = proxy_tensor._MakefxTracer._trace_inner
        def theirs(*args, **kwargs):
            return stock(*args, **kwargs)
        proxy_tensor._MakefxTracer._trace_inner = theirs
        from hops.__main__ import main
        main(["doctor"])
        """
    )
    assert "_MakefxTracer._trace_inner before hops, by <string>:" in printed


def test_disabled_it_says_so():
    printed = run(
        "from hops.__main__ import main; main(['doctor'])", environment={"HOPS_DISABLE": "1"}
    )
    assert "not installed (HOPS_DISABLE=1)" in printed
    assert "\npatched " not in printed
