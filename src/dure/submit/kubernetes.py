"""Manifests for Kubernetes: a TrainJob of Kubeflow Trainer v2, or an Indexed Job that needs no operator."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dure.errors import Misuse
from dure.process.stop_signals import RESUMABLE
from dure.submit.job import Job, run_command

Manifest = dict[str, Any]

PORT = 29500
STOP_SECONDS = 120
"""Seconds between SIGTERM and SIGKILL, to write a checkpoint."""
STARTS_PER_POD = 4
"""Starts per pod, on average over the nodes, after which the job has failed; disrupted pods do not count."""

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_POD_SUFFIX = len("-node-0-") + len("-xxxxx")
"""Length of the suffix that JobSet and Job append to a name for a pod, except its index."""
_LONGEST = 63

_WORDS_OF_YAML = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that YAML 1.1 reads as values and not as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions:
    """Settings specific to Kubernetes."""

    image: str
    """Container image with dure and the task."""
    kind: Literal["trainjob", "job"] = "trainjob"
    namespace: str | None = None
    runtime: str = "torch-distributed"
    """ClusterTrainingRuntime of a TrainJob."""
    claim: str | None = None
    """PersistentVolumeClaim for the runs, writable by all pods; None for none."""


def check_names(job: Job, options: KubernetesOptions) -> None:
    """Refuse names that Kubernetes would refuse later, or in a pod that would never start.

    Raises:
        Misuse: A name is invalid.
    """
    longest = _LONGEST - _POD_SUFFIX - len(str(job.nodes - 1))
    if not _LABEL.fullmatch(job.name) or len(job.name) > longest:
        raise Misuse(
            f"{job.name!r} cannot name a job of Kubernetes: use 1 to {longest} lower-case letters, digits or '-', the "
            "first a letter, the last no '-'"
        )
    names = {"--namespace": options.namespace, "--runtime": options.runtime, "--claim": options.claim}
    for flag, name in names.items():
        if name is not None and (not _SUBDOMAIN.fullmatch(name) or len(name) > 253):
            raise Misuse(
                f"{flag} is {name!r} but must be a name of Kubernetes: lower-case letters, digits, '-' and '.'"
            )
    if not re.fullmatch(r"[\w][\w.:/@-]*", options.image, re.ASCII):
        raise Misuse(f"--image is {options.image!r} but must name a container image, as registry/project:tag")


def manifests(job: Job, options: KubernetesOptions) -> list[Manifest]:
    """Return the manifests as plain values."""
    if options.kind == "trainjob":
        return [_train_job(job, options)]
    return [_service(job, options), _indexed_job(job, options)]


def _command(job: Job) -> list[str]:
    """Return a pod's command: a rank, or torchrun if a pod has several ranks; it reads the same PET_ variables."""
    command = list(job.train_command(job.words))
    if job.tasks_per_node > 1:
        command[1:3] = ["-m", "torch.distributed.run", "-m", "dure"]
    return command


def _metadata(job: Job, options: KubernetesOptions) -> Manifest:
    metadata: Manifest = {"name": job.name, "labels": {"app.kubernetes.io/managed-by": "dure"}}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    return metadata


def _resources(job: Job) -> Manifest:
    """Return a pod's resources; memory limits are left to the namespace."""
    requests, limits = {}, {}
    if job.cpus_per_task is not None:
        requests["cpu"] = str(job.cpus_per_task * job.tasks_per_node)
    if job.gpus_per_task:
        limits["nvidia.com/gpu"] = str(job.gpus_per_task * job.tasks_per_node)
    return {name: value for name, value in (("requests", requests), ("limits", limits)) if value}


def _volumes(job: Job, options: KubernetesOptions) -> tuple[list[Manifest], list[Manifest]]:
    """Return a pod's volumes and the mounts of its container."""
    # containers have 64 MiB of /dev/shm by default, where ranks of a pod and their loaders exchange tensors
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    if options.claim is not None:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}})
        mounts.append({"name": "runs", "mountPath": str(job.run.parent)})
    return volumes, mounts


# --- Kubeflow Trainer v2


def _train_job(job: Job, options: KubernetesOptions) -> Manifest:
    trainer: Manifest = {
        "image": options.image,
        "command": _command(job),
        "numNodes": job.nodes,
        "numProcPerNode": job.tasks_per_node,
    }
    if resources := _resources(job):
        trainer["resourcesPerNode"] = resources
    spec: Manifest = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": options.runtime,
        },
        "trainer": trainer,
        "runtimePatches": [_runtime_patch(job, options)],
    }
    if job.time_seconds is not None:
        spec["activeDeadlineSeconds"] = job.time_seconds
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, options),
        "spec": spec,
    }


def _runtime_patch(job: Job, options: KubernetesOptions) -> Manifest:
    volumes, mounts = _volumes(job, options)
    pod = {
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "containers": [{"name": "node", "volumeMounts": mounts}],
        "volumes": volumes,
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "manager": "dure.submit",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }


# --- without an operator


def _service(job: Job, options: KubernetesOptions) -> Manifest:
    """Return the service that gives each pod a name in the cluster's network; rank 0's is `<job>-0.<job>`."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, options),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": job.name},
            # ranks look up rank 0 while it starts
            "publishNotReadyAddresses": True,
            "ports": [{"name": "ranks", "port": PORT, "protocol": "TCP"}],
        },
    }


def _indexed_job(job: Job, options: KubernetesOptions) -> Manifest:
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": (STARTS_PER_POD - 1) * job.nodes,
        "podFailurePolicy": {"rules": _failure_rules(job)},
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/managed-by": "dure"}},
            "spec": _pod(job, options),
        },
    }
    if job.time_seconds is not None:
        spec["activeDeadlineSeconds"] = job.time_seconds
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job, options), "spec": spec}


def _failure_rules(job: Job) -> list[Manifest]:
    """Return the rules for failed pods, which are restarted unless that would be in vain."""
    rules: list[Manifest] = []
    if job.tasks_per_node == 1:  # torchrun exits with 1 on any failure
        in_vain = {"containerName": "node", "operator": "In", "values": [2, 3]}
        stopped = {"containerName": "node", "operator": "In", "values": [RESUMABLE]}
        rules.append({"action": "FailJob", "onExitCodes": in_vain})
        rules.append({"action": "Ignore", "onExitCodes": stopped})
    rules.append({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    return rules


def _pod(job: Job, options: KubernetesOptions) -> Manifest:
    volumes, mounts = _volumes(job, options)
    container: Manifest = {
        "name": "node",
        "image": options.image,
        "command": _command(job),
        "env": _torchruns_environment(job),
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "volumeMounts": mounts,
    }
    if resources := _resources(job):
        container["resources"] = resources
    return {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }


def _torchruns_environment(job: Job) -> list[Manifest]:
    """Return the variables that Kubeflow Trainer would set, for torchrun and for ranks (`cluster/rank.py`)."""
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    variables = {
        "PET_NNODES": str(job.nodes),
        "PET_NPROC_PER_NODE": str(job.tasks_per_node),
        "PET_MASTER_ADDR": f"{job.name}-0.{job.name}",
        "PET_MASTER_PORT": str(PORT),
    }
    environment: list[Manifest] = [{"name": name, "value": value} for name, value in variables.items()]
    return [*environment, {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}}]


# --- YAML


def to_yaml(documents: Sequence[Manifest]) -> str:
    """Format plain values as YAML. Every text is quoted as in JSON, so that it is never read as another type."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> Iterator[str]:
    """Yield the lines of a mapping or a list, indented from the left margin."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _entry(f"{_key(name)}:", item)
    else:
        for item in value:
            nested = list(_lines(item)) if _is_nested(item) else [_scalar(item)]
            yield f"- {nested[0]}"
            yield from (f"  {line}" for line in nested[1:])


def _entry(head: str, item: Any) -> Iterator[str]:
    if _is_nested(item):
        yield head
        yield from (f"  {line}" for line in _lines(item))
    else:
        yield f"{head} {_scalar(item)}"


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list) and bool(value)


def _key(name: str) -> str:
    is_plain = re.fullmatch(r"[A-Za-z][\w./-]*", name, re.ASCII) and name.lower() not in _WORDS_OF_YAML
    return name if is_plain else _scalar(name)


def _scalar(value: Any) -> str:
    # JSON's escapes beyond 16 bits are not valid in YAML
    text = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in text)


def apply(text: str) -> str:
    """Apply manifests to the current cluster of `kubectl`, and return its output.

    Raises:
        EnvironmentLacks: There is no `kubectl`.
        SubmissionRefused: The cluster refuses them.
    """
    command = ["kubectl", "apply", "-f", "-"]
    return run_command(command, given=text, lacking="install kubectl, or pipe --dry-run to where it is").strip()
