"""Rules on files that ranks write and read."""

import ast
from collections.abc import Iterator

from dure.scripts.lint.facts import Facts
from dure.scripts.lint.finding import Report, replaced, with_argument
from dure.scripts.lint.modules import (
    FUNCTIONS,
    Module,
    argument,
    below,
    constant,
    keyword,
    last,
    method,
    plain_name,
    subtree,
    words,
)

WRITERS = {
    "torch.save": 1, "numpy.save": 0, "numpy.savez": 0, "numpy.savetxt": 0, "pickle.dump": 1, "json.dump": 1,
    "shutil.copyfile": 1, "shutil.copy": 1, "shutil.move": 1, "shutil.rmtree": 0, "joblib.dump": 1, "yaml.dump": 1,
    "safetensors.torch.save_file": 1, "os.remove": 0, "os.unlink": 0,
}  # fmt: skip
"""Functions that write or remove, with the position of the path or file."""
LOGGERS = {"SummaryWriter": 0, "FileHandler": 0, "CSVLogger": 0}
METHODS = {
    "save_pretrained": 0,
    "savefig": 0,
    "to_csv": 0,
    "write_text": -1,
    "write_bytes": -1,
    "to_json": 0,
    "to_parquet": 0,
}
DOWNLOADS = {"MNIST", "FashionMNIST", "CIFAR10", "CIFAR100", "KMNIST", "EMNIST", "SVHN", "STL10", "VOCSegmentation",
    "Food101",
             "VOCDetection", "Flowers102", "OxfordIIITPet", "Caltech101", "QMNIST", "USPS", "CelebA",
             "WIKITEXT2"}  # fmt: skip
CHECKPOINT_WORDS = ("ckpt", "checkpoint", "resume", "snapshot", "weight", "model", "state", "pretrain", "best",
    "last", ".pth",
                    ".pt", ".tar", "load_path", "restore", "init", "finetune")  # fmt: skip


PREPARING = ("download", "prepare_data", "prepare_dataset", "preprocess", "extract", "unzip", "untar", "tokenize_data")
"""Parts of the names of functions that put data into files."""
READING = {"open", "load", "save", "memmap", "listdir", "read_csv", "FileHandler", "SummaryWriter", "ImageFolder"}


def written_by_all(facts: Facts) -> Iterator[Report]:
    """Find files that all ranks write under one name."""
    if not (facts.has_group or facts.accelerate or facts.fabric) or not facts.is_entry:
        return
    for module, call, name in facts.reported_calls:
        what = _written(facts, module, call, name)
        if what is None or not _is_of_all(facts, module, call) or _is_ordered(facts, module, call):
            continue
        if what[1] is not None and (_is_own_path(facts, module, what[1]) or _may_be_none(facts, module, call, what[1])):
            continue
        yield Report(
            module=module,
            node=call,
            what=f"all ranks {what[0]}"
            + ("" if "FileExists" in what[0] else ": they overwrite each other, and a reader can find a torn file"),
            cure="Let one rank do it (`if rank == 0:`), with a barrier after it if the others read the file; or put "
            "the rank into its name.",
        )


def _written(facts: Facts, module: Module, call: ast.Call, name: str) -> tuple[str, ast.expr | None] | None:
    leaf = last(name)
    if name in WRITERS:
        path = call.args[WRITERS[name]] if WRITERS[name] < len(call.args) else keyword(call, "f")
        if isinstance(path, ast.Name) and _is_opened(module, path):
            return None  # reported where it is opened
        if path is not None and "BytesIO" in {method(c) for _, c, _ in facts.project.calls_behind(module, path)}:
            return None
        verb = "remove" if leaf in ("rmtree", "remove", "unlink") else "write"
        return f"{verb} this file", path
    if leaf in LOGGERS and call.args + call.keywords:
        first = (
            call.args[0]
            if call.args
            else (keyword(call, "log_dir") or keyword(call, "logdir") or keyword(call, "filename"))
        )
        return (
            ("write to this log", first)
            if leaf != "SummaryWriter" or first is not None
            else ("write to this log", None)
        )
    if leaf == "SummaryWriter":
        return "write to this log", None
    if name == "wandb.init" and keyword(call, "group") is None and keyword(call, "mode") is None:
        return "open a run of their own in Weights & Biases, named alike", None
    if name == "open" and isinstance(call.func, ast.Name):
        mode = constant(argument(call, "mode", 1))
        if isinstance(mode, str) and set(mode) & set("wax+"):
            return "write this file", call.args[0] if call.args else None
        return None
    if isinstance(call.func, ast.Attribute) and leaf in METHODS:
        if keyword(call, "is_main_process") is not None or keyword(call, "save_function") is not None:
            return None
        position = METHODS[leaf]
        path = call.func.value if position < 0 else call.args[0] if call.args else None
        return ("write this file", path) if path is not None else None
    if name == "logging.basicConfig" and keyword(call, "filename") is not None:
        return "write to this log", keyword(call, "filename")
    if name in ("os.makedirs", "os.mkdir") and call.args and keyword(call, "exist_ok") is None and len(call.args) < 3:
        is_checked = any(
            "exists" in words(g.test) or "isdir" in words(g.test) for g in facts.ranks.guards(module, call)
        )
        if not is_checked and not any(isinstance(above, ast.Try) for above in module.within(call)):
            return "create this folder, which fails with FileExistsError on all but the first", call.args[0]
    if leaf in DOWNLOADS and constant(keyword(call, "download")) is True:
        return "download and unpack the data into one folder", call.args[0] if call.args else keyword(call, "root")
    return None


def _is_opened(module: Module, name: ast.Name) -> bool:
    for above in module.within(name):
        if isinstance(above, ast.With):
            for item in above.items:
                if plain_name(item.optional_vars or item.context_expr) == name.id:
                    return True
    values = module.names.get(module.scope_of(name), {}).get(name.id, [])
    return any(isinstance(a.value, ast.Call) and method(a.value) == "open" for a in values)


def _is_of_all(facts: Facts, module: Module, call: ast.Call) -> bool:
    """Return whether all ranks certainly come to a place."""
    ranks = facts.ranks
    if not ranks.runs_on_ranks(module, call) or ranks.is_single(module, call):
        return False
    if ranks.reached_by(module, call) is not None:
        return False
    return _reached_from_entry(facts, module, call, 0, set())


def _reached_from_entry(facts: Facts, module: Module, node: ast.AST, depth: int, seen: set[ast.AST]) -> bool:
    """Return whether a known way leads from the script's start to a place, with no test of the rank on it."""
    if facts.ranks.local_guard(module, node) is not None or facts.ranks.is_single(module, node):
        return False
    if any(_asks_unknown(facts, module, guard.test) for guard in facts.ranks.guards(module, node)):
        return False
    scope = module.scope_of(node)
    if not isinstance(scope, FUNCTIONS):
        has_group = any(
            last(name) in ("init_process_group", "Accelerator", "Fabric", "init")
            for m, _, name in facts.calls()
            if m is module
        )
        return not module.is_context or has_group
    if scope in seen or depth > 6:
        return False
    seen.add(scope)
    if scope in facts.ranks.spawned:
        return True
    sites = [s for s in facts.project.sites.get(scope, []) if not s.is_spawn]
    return any(_reached_from_entry(facts, s.module, s.call, depth + 1, seen) for s in sites)


def _asks_unknown(facts: Facts, module: Module, test: ast.expr) -> bool:
    """Return whether a test may stand for the rank although its name does not tell: a writer that is None elsewhere."""
    for item in subtree(test):
        written = plain_name(item)
        name = last(written).lower()
        if name in ("writer", "logger", "tb_writer", "log_writer", "saver", "is_save", "log", "wandb"):
            return True
        if name in ("output_dir", "save_dir", "log_dir") and not _is_flag(module, written):
            return True
        if any(word in name for word in ("rank", "master", "main_proc", "primary", "should_save", "is_log")):
            return True
    return False


def _is_flag(module: Module, written: str) -> bool:
    """Return whether a name is an option of the command line, which is the same on all ranks."""
    owner = written.rpartition(".")[0]
    return owner in ("args", "opt", "opts", "cfg", "config", "self.args") and written not in module.attributes


def _is_ordered(facts: Facts, module: Module, call: ast.Call) -> bool:
    """Return whether ranks come to a place one after the other: by barriers under tests of the rank around it."""
    guarded = [
        item.lineno
        for item in below(module.scope_of(call), into_functions=False)
        if isinstance(item, ast.Call)
        and facts.collective(module, item) == "barrier"
        and facts.ranks.local_guard(module, item) is not None
    ]
    return any(line < call.lineno for line in guarded) and any(line > call.lineno for line in guarded)


def _may_be_none(facts: Facts, module: Module, call: ast.Call, path: ast.expr) -> bool:
    """Return whether a path is None on some ranks, as far as a test of it or an assignment shows."""
    name = plain_name(path)
    if any(name and plain_name(guard.test) == name for guard in facts.ranks.guards(module, call)):
        return True
    return bool(name) and any(constant(o.node) is None for o in facts.project.origins(module, path))


OWN_PLACES = {
    "tempfile", "temporarydirectory", "mkdtemp", "namedtemporaryfile", "tmpdir", "bytesio", "stringio", "buffer",
    "devnull", "stdout", "pid", "getpid", "uuid", "uuid4", "now", "strftime", "isoformat", "timestamp", "time",
}  # fmt: skip
"""Names in paths that are others on each rank, or of no file."""


def _is_own_path(facts: Facts, module: Module, path: ast.expr) -> bool:
    """Return whether a path has the rank or the time in it, or is of a temporary folder."""
    for other, node in _parts_of(facts, module, path, 3):
        if facts.ranks.depends_on_rank(other, node):
            return True
        named = {word.lower() for word in words(node)}
        if named & OWN_PLACES or any("rank" in word for word in named):
            return True
    return False


def _parts_of(facts: Facts, module: Module, node: ast.expr, depth: int) -> Iterator[tuple[Module, ast.expr]]:
    """Yield an expression, and those that the variables in it come from."""
    yield module, node
    for item in subtree(node) if depth else ():
        if isinstance(item, ast.Name | ast.Attribute):
            for origin in facts.project.origins(module, item):
                if isinstance(origin.node, ast.expr) and origin.node is not item:
                    yield from _parts_of(facts, origin.module, origin.node, depth - 1)


# --- read before they are there


def read_before_written(facts: Facts) -> Iterator[Report]:
    """Find files that one rank writes and all read, with nothing between that waits for it."""
    if not (facts.has_group or facts.accelerate or facts.fabric):
        return
    for module, call, name in facts.calls():
        key = _key(module, call, name)
        if key is None:
            continue
        found = facts.ranks.local_guard(module, call)
        if found is None or found[0] != "some" or found[1].is_exit or not facts.ranks.runs_on_ranks(module, call):
            continue
        reading = _read_later(facts, module, call, key)
        if reading is not None:
            yield Report(
                module=module,
                node=reading,
                what=f"rank 0 makes this in line {call.lineno}, and nothing makes the others wait for it: they can "
                f"read a file "
                "that is not there yet, half of it, or an old one",
                cure="Call `torch.distributed.barrier()` (Accelerate: `wait_for_everyone()`) on all ranks "
                "between the two.",
            )


def _key(module: Module, call: ast.Call, name: str) -> tuple[str, str] | None:
    """Return the kind and the text of what is written: a path, or a data set that is downloaded."""
    if name in ("torch.save", "numpy.save", "json.dump", "pickle.dump"):
        position = 0 if name == "numpy.save" else 1
        path = call.args[position] if position < len(call.args) else keyword(call, "f")
        return ("path", ast.unparse(path)) if path is not None else None
    if constant(keyword(call, "download")) is True:
        return "data", last(name)
    leaf = last(name).lower()
    is_making = name in ("os.makedirs", "os.mkdir") or any(word in leaf for word in PREPARING)
    return ("argument", ast.unparse(call.args[0])) if is_making and call.args else None


def _read_later(facts: Facts, module: Module, call: ast.Call, key: tuple[str, str]) -> ast.Call | None:
    scope = module.scope_of(call)
    loops = module.loops_of(call)
    for item in below(scope, into_functions=False):
        if (
            isinstance(item, ast.Call)
            and item.lineno > (call.end_lineno or 0)
            and facts.collective(module, item)
            and (facts.ranks.local_guard(module, item) is None or facts.collective(module, item) == "barrier")
        ):
            return None
        if isinstance(item, ast.Call) and item.lineno > (call.end_lineno or 0):
            for other, function, _ in facts.project.targets.get(item, ()):
                if any(isinstance(n, ast.Call) and facts.collective(other, n) for n in subtree(function)):
                    return None
            if any(wrap.call is item and wrap.kind != "dp" for wrap in facts.wraps):
                return None  # its construction is a collective
        if not isinstance(item, ast.Call) or item.lineno <= (call.end_lineno or 0):
            continue
        if facts.ranks.local_guard(module, item) is not None:
            continue
        name = module.called(item) or method(item)
        if key[0] == "data":
            if last(name) == key[1] and constant(keyword(item, "download")) is not True:
                return item
        elif key[0] == "argument":
            is_reading = last(name) in READING or "dataset" in last(name).lower()
            if is_reading and any(_mentions_text(arg, key[1]) for arg in item.args):
                return item
        elif last(name) in ("load", "open") and item.args and ast.unparse(item.args[0]) == key[1]:
            if loops and module.loops_of(item)[:1] != loops[:1] and facts.has_backward(module, scope):
                return item
            return item
    return None


def _mentions_text(node: ast.expr, text: str) -> bool:
    return any(
        isinstance(item, ast.Name | ast.Attribute | ast.Constant) and ast.unparse(item) == text
        for item in subtree(node)
    )


# --- where tensors are loaded to


def loaded_without_place(facts: Facts) -> Iterator[Report]:
    """Find checkpoints that every rank loads onto the device that saved them."""
    if not facts.has_ranks or not facts.on_accelerators:
        return
    for module, call, name in facts.reported_calls:
        if name != "torch.load" or not call.args or len(call.args) > 1 or keyword(call, "map_location") is not None:
            continue
        if any(item.arg is None for item in call.keywords) or not facts.ranks.runs_on_ranks(module, call):
            continue
        if facts.ranks.is_without_ranks(module, call) or facts.ranks.reached_by(module, call) == "some":
            continue
        if any("gpu" in words(g.test) and constant(getattr(g.test, "comparators", [None])[0]) is None and g.is_true
               for g in facts.ranks.guards(module, call) if isinstance(g.test, ast.Compare)
               and isinstance(g.test.ops[0], ast.Is)):  # fmt: skip
            continue
        if not _is_checkpoint(facts, module, call) or not facts.is_about_ranks(module):
            continue
        if _is_named_by_rank(facts, module, call.args[0]):  # this rank has saved it
            continue
        edits = with_argument(module, call, 'map_location="cpu"')
        yield Report(
            module=module,
            node=call,
            what="tensors are loaded onto the device they were saved from, mostly cuda:0: there every rank takes "
            "memory of one "
            "device, and a host without that device fails",
            cure='Add `map_location="cpu"`; `load_state_dict` copies to each rank\'s own device.',
            edits=edits,
            is_safe=_is_only_loaded(module, call),
        )


def _is_checkpoint(facts: Facts, module: Module, call: ast.Call) -> bool:
    statement = module.statement_of(call)
    text = module.source.segment(call).lower()
    targets = " ".join(plain_name(t) for t in getattr(statement, "targets", [])).lower()
    if any(word in text for word in ("dataset", "data_path", "features", "vocab", "data.pt", "cache")):
        return False
    if any(word in f"{text} {targets}" for word in CHECKPOINT_WORDS):
        return True
    return any(isinstance(a, ast.Call) and method(a) == "load_state_dict" for a in module.within(call))


def _is_only_loaded(module: Module, call: ast.Call) -> bool:
    """Return whether the loaded values go nowhere but into `load_state_dict` or plain variables of counts."""
    above = module.parents[call]
    if isinstance(above, ast.Subscript):
        above = module.parents[above]
    if isinstance(above, ast.Call):
        return method(above) == "load_state_dict"
    if not isinstance(above, ast.Assign) or len(above.targets) != 1 or not isinstance(above.targets[0], ast.Name):
        return False
    name = above.targets[0].id
    uses = [
        item
        for item in subtree(module.scope_of(call))
        if isinstance(item, ast.Name) and item.id == name and isinstance(item.ctx, ast.Load)
    ]
    return bool(uses) and all(_is_harmless(module, item) for item in uses)


def _is_harmless(module: Module, use: ast.AST) -> bool:
    above = module.parents[use]
    key: object = None
    if isinstance(above, ast.Subscript):
        key, above = constant(above.slice), module.parents[above]
    if isinstance(above, ast.Call):
        return method(above) == "load_state_dict"
    words_ = ("epoch", "step", "iter", "best", "args", "arch", "config", "batch", "cfg", "loss", "acc", "EPOCHS_RUN")
    is_count = isinstance(key, str) and any(word.lower() in key.lower() for word in words_)
    return is_count or isinstance(above, ast.Compare)


def _is_named_by_rank(facts: Facts, module: Module, path: ast.expr, depth: int = 3) -> bool:
    """Return whether the number of the rank is part of a path."""
    if facts.ranks.depends_on_rank(module, path):
        return True
    return depth > 0 and any(
        origin.node is not name
        and isinstance(origin.node, ast.expr)
        and _is_named_by_rank(facts, origin.module, origin.node, depth - 1)
        for name in subtree(path)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)
        for origin in facts.project.origins(module, name)
    )


def saved_with_wrapper(facts: Facts) -> Iterator[Report]:
    """Find checkpoints whose names begin with `module.` because the wrapper was saved."""
    if facts.deepspeed or facts.accelerate or facts.fabric:
        return
    for module, call, _name in facts.reported_calls:
        if method(call) != "state_dict" or not isinstance(call.func, ast.Attribute) or call.args or call.keywords:
            continue
        owner = call.func.value
        if not plain_name(owner) or last(plain_name(owner)) == "module":
            continue
        wrap = facts.wrap_behind(module, owner, "ddp dp")
        is_saved = any(
            isinstance(above, ast.Call) and (method(above) == "save" or "save" in method(above))
            for above in module.within(call)
        )
        if (
            wrap is None
            or not is_saved
            or (wrap.kind == "ddp" and facts.ranks.is_single(wrap.module, wrap.call))
            or _is_loaded_back(facts, wrap.kind)
        ):
            continue
        text = module.source.segment(owner)
        yield Report(
            module=module,
            node=call,
            what="the wrapper is saved, so all names in the file begin with `module.`: a model that is not wrapped, "
            "as for inference or on one "
            "device, refuses them",
            cure=f"Save `{text}.module.state_dict()`.",
            edits=(replaced(module, owner, f"{text}.module"),),
        )


def _is_loaded_back(facts: Facts, kind: str) -> bool:
    """Return whether the names with `module.` are loaded into a wrapper, or are stripped."""
    for module, call, _ in facts.calls():
        if (
            method(call) == "load_state_dict"
            and isinstance(call.func, ast.Attribute)
            and facts.wrap_behind(module, call.func.value, kind) is not None
        ):
            return True
    return any(word in ("module.", "consume_prefix_in_state_dict_if_present") for word in facts.words)
