"""Rules on which ranks evaluate which samples."""

import ast
from collections.abc import Iterator

from dure.scripts.lint.facts import Facts, Loader
from dure.scripts.lint.finding import Report
from dure.scripts.lint.modules import FUNCTIONS, Function, Module, last, method, plain_name, subtree, words
from dure.scripts.lint.rules.reductions import is_loader
from dure.scripts.lint.rules.sampling import is_divided_otherwise


def evaluated_on_one_rank(facts: Facts) -> Iterator[Report]:
    """Find evaluations that one rank makes while the others wait."""
    if not (facts.has_group or facts.accelerate or facts.fabric):
        return
    seen: set[int] = set()
    for module, call, _ in facts.reported_calls:
        if not facts.ranks.runs_on_ranks(module, call):
            continue
        found = facts.ranks.local_guard(module, call)
        if found is None or found[0] != "some" or found[1].is_exit:
            continue
        if (
            not _is_evaluation_call(facts, module, call)
            or id(found[1].test) in seen
            or not _goes_on(facts, module, call)
        ):
            continue
        seen.add(id(found[1].test))
        yield Report(
            module=module,
            node=call,
            what="one rank evaluates on its own, and the others wait for it in their next collective: they are "
            "idle, a long "
            "evaluation ends in a timeout, and a forward of a DDP model with buffers broadcasts them, which hangs",
            cure="Let all ranks evaluate a share each (a DistributedSampler without shuffle) and all_reduce sums "
            "and counts.",
        )
    for module, loop, source in facts.iterations:
        found = facts.ranks.local_guard(module, loop)
        if found is None or found[0] != "some" or id(found[1].test) in seen or found[1].is_exit:
            continue
        if facts.is_evaluation(module, loop) and is_loader(facts, module, source):
            seen.add(id(found[1].test))
            yield Report(
                module=module,
                node=loop,
                what="one rank evaluates on its own, and the others wait for it in their next collective: they are "
                "idle, and a "
                "long evaluation ends in a timeout",
                cure="Let all ranks evaluate a share each (a DistributedSampler without shuffle) and all_reduce sums "
                "and counts.",
            )


def _goes_on(facts: Facts, module: Module, call: ast.Call) -> bool:
    """Return whether training goes on after the evaluation: at the end of a script no rank waits for long."""
    node: ast.AST = call
    for _ in range(4):
        if module.loops_of(node):
            return True
        scope = module.scope_of(node)
        sites = facts.project.sites.get(scope, []) if isinstance(scope, FUNCTIONS) else []
        if not sites:
            return False
        module, node = sites[0].module, sites[0].call
    return False


def _is_evaluation_call(facts: Facts, module: Module, call: ast.Call) -> bool:
    for other, function, _ in facts.project.targets.get(call, ()):
        if facts.is_evaluating_function(other, function) and _loops_and_forwards(facts, other, function):
            return True
    return False


def _loops_and_forwards(facts: Facts, module: Module, function: Function) -> bool:
    for other, part in facts.project.with_called(module, function, depth=2):
        for item in subtree(part):
            if (
                isinstance(item, ast.For | ast.While)
                and any(isinstance(inner, ast.Call) and _is_forward(inner) for inner in subtree(item))
                and facts.ranks.local_guard(other, item) is None
            ):
                return True
    return False


def _is_forward(call: ast.Call) -> bool:
    name = last(plain_name(call.func)).lower()
    is_model = (
        "model" in name
        or "net" in name.split("_")
        or name in ("net", "module", "network", "encoder", "backbone", "ddp")
    )
    return is_model and method(call) not in ("DataParallel",) and bool(call.args or call.keywords)


def evaluated_by_all(facts: Facts) -> Iterator[Report]:
    """Find evaluations in which every rank goes through all samples."""
    if not (facts.divides_itself or facts.accelerate) or facts.deepspeed:
        return
    for loader in facts.loaders:
        module, call = loader.module, loader.call
        if loader.use != "eval" or loader.sampler is not None or loader.has_unknown:
            continue
        if not facts.ranks.runs_on_ranks(module, call) or facts.ranks.is_without_ranks(module, call):
            continue
        if facts.ranks.reached_by(module, call) is not None or not _all_evaluate(facts, loader):
            continue
        if is_divided_otherwise(facts, loader):
            continue
        yield Report(
            module=module,
            node=call,
            what="every rank evaluates all samples: the evaluation takes as long as on one process, however many "
            "ranks there are",
            cure="Give the loader `sampler=DistributedSampler(data, shuffle=False)`, and all_reduce sums and counts "
            "of samples "
            "(without the samples by which the sampler fills up the last ranks).",
        )


def _all_evaluate(facts: Facts, loader: Loader) -> bool:
    for module, loop, source in facts.iterations:
        if not any(c is loader.call for _, c, _ in facts.project.calls_behind(module, source)):
            continue
        if not facts.is_evaluation(module, loop) or facts.ranks.local_guard(module, loop) is not None:
            continue
        if facts.accelerate and any(last(n) == "prepare" for _, _, n in facts.project.calls_behind(module, source)):
            continue
        scope = module.scope_of(loop)
        if not isinstance(scope, FUNCTIONS):
            return facts.ranks.reached_by(module, loop) is None
        sites = [s for s in facts.project.sites.get(scope, []) if not s.is_spawn]
        if not sites:
            return True
        for site in sites:
            given = [*site.call.args, *(item.value for item in site.call.keywords)]
            passes = any(
                c is loader.call for arg in given for _, c, _ in facts.project.calls_behind(site.module, arg)
            ) or not any("loader" in word.lower() for arg in given for word in words(arg))
            if (
                passes
                and facts.ranks.reached_by(site.module, site.call) is None
                and not facts.ranks.is_without_ranks(site.module, site.call)
            ):
                return True
    return False
