"""The manifests as Kubernetes' and Kubeflow Trainer's own models read them."""

import pytest

from dure.api.submit import Training, Wishes, prepare
from dure.submit import kubernetes

pytestmark = pytest.mark.cluster

WISHES = [
    {},
    {"nodes": 3, "tasks_per_node": 4, "time": "1-0", "cpus_per_task": 2, "gpus_per_task": 1},
    {"nodes": 2, "claim": "runs", "namespace": "team"},
]


def written(kind, wishes):
    """Return what is applied, read back from the text."""
    import yaml

    asked = Wishes(to="kubernetes", image="registry/dure:1", kind=kind, name="run", **wishes)
    prepared = prepare(Training(task="tasks:Digits", options={"word": "yes: 'no' \"\u00e9\" \U0001f600\n"}), asked)
    documents = list(yaml.safe_load_all(prepared.text))
    options = kubernetes.KubernetesOptions(
        image="registry/dure:1", kind=kind, claim=asked.claim, namespace=asked.namespace
    )
    assert documents == kubernetes.manifests(prepared.job, options)
    return documents


@pytest.mark.parametrize("wishes", WISHES)
def test_train_job_when_read_by_kubeflows_model_then_every_field_is_known(wishes):
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    (document,) = written("trainjob", wishes)
    # fields that the model does not know would be dropped, values of a wrong type refused
    assert TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document


@pytest.mark.parametrize("wishes", WISHES)
def test_indexed_job_when_read_by_kubernetes_models_then_every_field_is_known(wishes):
    from kubeflow_trainer_api.models.io_k8s_api_batch_v1_job_spec import IoK8sApiBatchV1JobSpec
    from kubeflow_trainer_api.models.io_k8s_api_core_v1_service import IoK8sApiCoreV1Service
    from kubeflow_trainer_api.models.io_k8s_apimachinery_pkg_apis_meta_v1_object_meta import (
        IoK8sApimachineryPkgApisMetaV1ObjectMeta,
    )

    service, job = written("job", wishes)
    assert IoK8sApiCoreV1Service.from_dict(service).to_dict() == service
    assert IoK8sApiBatchV1JobSpec.from_dict(job["spec"]).to_dict() == job["spec"]
    assert IoK8sApimachineryPkgApisMetaV1ObjectMeta.from_dict(job["metadata"]).to_dict() == job["metadata"]
    assert (job["apiVersion"], job["kind"], set(job)) == ("batch/v1", "Job", {"apiVersion", "kind", "metadata", "spec"})


def test_model_when_a_field_is_unknown_then_the_comparison_finds_it():
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    (document,) = written("trainjob", {})
    document["spec"]["trainer"]["numNode"] = 2
    assert TrainerV1alpha1TrainJob.from_dict(document).to_dict() != document
