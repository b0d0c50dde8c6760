"""Second build of a task's parts as if in one process, to find data and models that depend on the number of ranks."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dure.data.randomness import kept_global_randomness
from dure.spec import RunSpec
from dure.strategies.state.objects.namespaces import ATOMS
from dure.strategies.state.trial import is_equal
from dure.torchcompat.one_process import as_one_process
from dure.training.inspection.collectives import CollectiveCalled, no_collectives
from dure.training.inspection.loss_calls import aside
from dure.training.seeds import seed_everything
from dure.training.session.loader import SampleFetch
from dure.training.task.given_task import make_task
from dure.training.task.identity import refuse_unlike_samples, sample_views
from dure.training.task.task import Task


@dataclass(frozen=True, kw_only=True)
class TaskParts:
    """A task and the parts that it built."""

    task: Task
    train_data: Any
    eval_data: Any
    model: nn.Module

    @classmethod
    def build(cls, spec: RunSpec) -> "TaskParts":
        """Build all parts again, without preparing the data again."""
        seed_everything(spec.seed)
        task = make_task(spec.task, spec.task_options, is_another=True)
        seed_everything(spec.seed)
        train_data, eval_data = task.train_data(), task.eval_data()
        seed_everything(spec.seed)
        return cls(task=task, train_data=train_data, eval_data=eval_data, model=task.build_model())


@dataclass(frozen=True, kw_only=True)
class OneProcessBuild:
    """Differences between a task built in this run and the same task built in one process."""

    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Plain attributes of the task whose values differ in one process, with those values."""
    difference: str | None = None
    """Description of the first difference in data or model, or of a build that fails; None if there is none."""
    failure: str | None = None
    """Class of the error raised by the build in one process; None if it succeeded."""

    @contextmanager
    def entered(self, task: Task) -> Iterator[None]:
        """Run the task's code with the environment and the attributes that it has in one process."""
        before = {name: value for name, value in vars(task).items() if name in self.attributes}
        vars(task).update(self.attributes)
        try:
            with as_one_process():
                yield
        finally:
            vars(task).update(before)


def build_as_one_process(spec: RunSpec, here: TaskParts) -> OneProcessBuild:
    """Build a task's parts again, as one process would, and compare them with those of this run.

    If they differ, they are built once more in the original environment. A difference that appears there too is caused
    by building twice, for example by a task that changes its input in place.

    Args:
        spec: Spec of the run.
        here: Parts that the task built as one of the run's ranks.
    """
    build = _built_again(spec, here, as_one_process())
    if build == OneProcessBuild():
        return build
    again = _built_again(spec, here, nullcontext())
    if build.failure is not None:
        what = "where it is the only process" if again.failure is None else "when it is built once more"
        return OneProcessBuild(
            difference=f"it fails with {build.failure} {what}, so what would follow from it is not known"
        )
    if again.failure is not None:
        return build
    return OneProcessBuild(
        attributes={name: value for name, value in build.attributes.items() if name not in again.attributes},
        difference=build.difference if again.difference is None else None,
    )


def _built_again(spec: RunSpec, here: TaskParts, surroundings: AbstractContextManager[object]) -> OneProcessBuild:
    """Build a task's parts in another environment, and return their differences from the original ones."""
    try:
        with aside(), kept_global_randomness(), surroundings, no_collectives():
            there = TaskParts.build(spec)
            attributes = _differing(vars(here.task), vars(there.task))
            return OneProcessBuild(attributes=attributes, difference=_difference(spec, here, there))
    except (Exception, CollectiveCalled) as error:
        return OneProcessBuild(failure=type(error).__name__)


def _differing(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: there[name]
        for name, value in here.items()
        if isinstance(value, ATOMS) and isinstance(there.get(name), ATOMS) and there[name] != value
    }


def _difference(spec: RunSpec, here: TaskParts, there: TaskParts) -> str | None:
    for kind in ("training", "evaluation"):
        one, other = _data(here, kind), _data(there, kind)
        if one is None or other is None:
            continue
        if len(one) != len(other):
            return f"the {kind} data have {len(one):,} samples here and {len(other):,} in one process"
        fetches = [SampleFetch(data, parts.task.collate, spec.seed) for data, parts in ((one, here), (other, there))]
        views = [{kind: sample_views(len(one), fetch.sample)} for fetch in fetches]
        try:
            refuse_unlike_samples(views)
        except Exception:
            return f"the {kind} data have other samples here than in one process"
    others = dict(there.model.named_parameters())
    for name, parameter in here.model.named_parameters():
        if name not in others:
            return f"the model has a parameter {name} here and none in one process"
        if parameter.shape != others[name].shape:
            return f"{name} has the shape {[*parameter.shape]} here and {[*others[name].shape]} in one process"
        if not is_equal(parameter, others[name]):
            return f"{name} begins with other values here than in one process"
    return None


def _data(parts: TaskParts, kind: str) -> Any:
    return parts.train_data if kind == "training" else parts.eval_data
