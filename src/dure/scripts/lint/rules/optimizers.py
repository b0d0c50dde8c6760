"""Rules on the parameters that an optimiser has."""

import ast
from collections.abc import Iterator

from dure.scripts.lint.facts import Facts
from dure.scripts.lint.finding import Report, replaced
from dure.scripts.lint.modules import FUNCTIONS, Module, argument, below, method, plain_name, subtree


def other_parameters(facts: Facts) -> Iterator[Report]:
    """Find optimisers whose parameters are not those of the model that is trained."""
    for module, call in facts.optimizers:
        given = argument(call, "params", 0)
        if not (
            isinstance(given, ast.Call) and method(given) == "parameters" and isinstance(given.func, ast.Attribute)
        ):
            continue
        owner = given.func.value
        name = plain_name(owner)
        if not name:
            continue
        place = _replaced_later(facts, module, call, name)
        if place is not None:
            yield Report(
                module=module,
                node=call,
                what=f"`{name}` is made again in line {place}, after this: the optimiser steps parameters of the old "
                f"model, and the "
                "one that is trained never changes",
                cure="Build the optimiser after the last line that makes the model.",
            )
        elif (trained := _trains_another(facts, module, call, owner)) is not None:
            yield Report(
                module=module,
                node=call,
                what=f"the optimiser has the parameters of `{name}`, but the loss is computed with `{trained}`, "
                f"another object: its weights "
                "never change",
                cure=f"Build the optimiser from `{trained}.parameters()`.",
                edits=(replaced(module, owner, trained),),
            )


def _replaced_later(facts: Facts, module: Module, call: ast.Call, name: str) -> int | None:
    scope = module.scope_of(call)
    values = (module.attributes if "." in name else module.names.get(scope, {})).get(name, [])
    block = module.block_of(module.statement_of(call))
    for assignment in values:
        statement = assignment.statement
        if "." in name and module.scope_of(statement) is not scope:
            continue
        if not any(item is statement for item in block) or getattr(statement, "lineno", 0) <= call.lineno:
            continue
        value = assignment.value
        is_copy = isinstance(value, ast.Call) and method(value) == "deepcopy"
        if not isinstance(value, ast.Call) or (name in {plain_name(n) for n in subtree(value)} and not is_copy):
            continue
        before = [a.value for a in values if getattr(a.statement, "lineno", 0) < call.lineno]
        made = {module.called(v) for v in before if isinstance(v, ast.Call)}
        if module.called(value) in made or method(value) in ("deepcopy", "from_pretrained", "load_model"):
            later = [c for c in module.calls if c.lineno > call.lineno and method(c) in ("backward", "step")]
            again = [
                c
                for m, c in facts.optimizers
                if m is module and c.lineno > getattr(statement, "lineno", 0) and module.scope_of(c) is scope
            ]
            if later and not again:
                return getattr(statement, "lineno", None)
    return None


def _trains_another(facts: Facts, module: Module, call: ast.Call, owner: ast.expr) -> str | None:
    """Return the model whose forward the training loop calls, if it is certainly not the optimiser's."""
    if len(facts.optimizers) != 1:
        return None
    own = makers(facts, module, owner)
    if own is None:
        return None
    for other, loop in facts.step_loops:
        called = []
        for item in below(loop):
            if isinstance(item, ast.Call) and plain_name(item.func) and not facts.project.targets.get(item):
                made_by = makers(facts, other, item.func)
                if made_by:
                    called.append((plain_name(item.func), made_by))
        if len(called) == 1 and not called[0][1] & own and other.scope_of(loop) is module.scope_of(call):
            return called[0][0]
    return None


def makers(facts: Facts, module: Module, node: ast.expr) -> set[ast.AST] | None:
    """Return the calls that make the model that a value is, through its wrappers; None if they are not known."""
    found: set[ast.AST] = set()
    pending = [(module, node)]
    seen: set[ast.AST] = set()
    while pending:
        other, item = pending.pop()
        for origin in facts.project.origins(other, item):
            wrap = next((w for w in facts.wraps if w.call is origin.node), None)
            if wrap is not None and wrap.model is not None:
                if wrap.call not in seen:
                    seen.add(wrap.call)
                    pending.append((wrap.module, wrap.model))
            elif (
                isinstance(origin.node, ast.Call)
                and origin.item is None
                and _makes_model(facts, origin.module, origin.node)
            ):
                found.add(origin.node)
            else:
                return None
    return found or None


def _makes_model(facts: Facts, module: Module, call: ast.Call) -> bool:
    if method(call) == "deepcopy" or module.called(call).startswith("torchvision.models."):
        return True
    found = facts.project.definition(module, call.func)
    if found is not None and isinstance(found[1], ast.ClassDef):
        return "forward" in {item.name for item in found[1].body if isinstance(item, FUNCTIONS)}
    return module.called(call) in ("torch.nn.Sequential", "torch.nn.Linear")
