"""Variables that launchers leave in the environment, and what dure reads in them."""

import pytest

from dure.cluster.rank import LAUNCHERS, PORTS, RankInfo, meeting_point, read_launcher
from dure.cluster.slurm_hostlist import MOST_HOSTS, expand_hosts, tasks_on_node
from dure.errors import EnvironmentLacks, Misuse

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"} | {
    "MASTER_ADDR": "one",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
RAY = {"RANK": "3", "LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_JOB_ID": "81",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "9",
    "SLURM_JOB_NODELIST": "login,n[1-2]",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(
    ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"), ("3", "1", "4", "2"), strict=True
)} | {"PMIX_NAMESPACE": "2914713601"}  # fmt: skip
KUBEFLOW = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_NPROC_PER_NODE": "1"} | {
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "3",
}
INDEXED = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "29500"}
ON_TWO_HOSTS = RankInfo(rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2)
ON_FOUR_HOSTS = RankInfo(rank=3, node_rank=3, world_size=4)

ROWS = {
    "torchrun": (TORCHRUN, ON_TWO_HOSTS),
    "Ray Train": (RAY, ON_TWO_HOSTS),
    "mpirun": (OPEN_MPI, ON_TWO_HOSTS),
    "srun": (SLURM, ON_TWO_HOSTS),
    "Kubeflow Trainer": (KUBEFLOW, ON_FOUR_HOSTS),
    "an Indexed Job": (INDEXED, ON_FOUR_HOSTS),
}


def test_cases_when_compared_with_the_table_then_no_launcher_is_left_out():
    assert list(ROWS) == [row.name for row in LAUNCHERS]


@pytest.mark.parametrize("name", ROWS)
def test_launcher_when_its_variables_are_set_then_the_rank_is_read(name):
    environ, expected = ROWS[name]
    launched = read_launcher(environ)
    assert (launched.by, launched.rank) == (name, expected)


@pytest.mark.parametrize("name", ROWS)
def test_launcher_when_it_started_one_process_then_only_torchs_make_it_a_rank(name):
    environ = {**ROWS[name][0]}
    for variable in environ:
        if variable.endswith(("RANK", "PROCID", "LOCALID", "NODEID", "INDEX")):
            environ[variable] = "0"
        if variable.endswith(("SIZE", "TASKS", "NNODES")):
            environ[variable] = "1"
    launched = read_launcher({**environ, "SLURM_STEP_TASKS_PER_NODE": "1"})
    assert (launched is None) == (name not in ("torchrun", "Ray Train"))


@pytest.mark.parametrize("name", ROWS)
def test_launcher_when_a_number_is_none_then_it_is_refused(name):
    environ, _ = ROWS[name]
    row = next(row for row in LAUNCHERS if row.name == name)
    variable = row.place["world_size"].names[0]
    with pytest.raises(EnvironmentLacks, match=f"incomplete .*{variable}=many"):
        read_launcher({**environ, variable: "many", "OMPI_COMM_WORLD_SIZE": "many"})


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"])
def test_torchrun_when_a_variable_is_missing_then_it_is_refused(missing):
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(EnvironmentLacks, match=f"looks like torchrun's but is incomplete .*{missing}=None"):
        read_launcher(environ)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # a batch script, and the shell of salloc
        {"SLURM_STEP_ID": "4294967291"},  # the batch step
        {"SLURM_STEP_ID": "4294967290"},  # an interactive step
        {"SLURM_STEP_ID": None, "SLURM_PROCID": None, "SLURM_LOCALID": None, "SLURM_NODEID": None},
    ],
)
def test_slurm_when_it_is_a_shell_then_it_is_no_rank(changes):
    environ = {name: value for name, value in {**SLURM, **changes}.items() if value is not None}
    assert read_launcher(environ) is None


def test_slurm_when_nodes_have_unequal_tasks_then_each_knows_its_own():
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert read_launcher(environ).rank.local_world_size == 1
    with pytest.raises(EnvironmentLacks, match="SLURM_STEP_TASKS_PER_NODE=4"):
        read_launcher({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4"})


def test_slurm_when_it_gives_each_task_cores_then_they_are_known():
    assert read_launcher({**SLURM, "SLURM_CPUS_PER_TASK": "6"}).cores == 6
    assert read_launcher(SLURM).cores is None


def test_indexed_job_when_nothing_speaks_of_others_then_each_index_is_a_run_of_its_own():
    assert read_launcher({"JOB_COMPLETION_INDEX": "3"}) is None
    with pytest.raises(EnvironmentLacks, match=r"incomplete .*WORLD_SIZE=None"):
        read_launcher({"JOB_COMPLETION_INDEX": "3", "MASTER_ADDR": "job-0.job"})


@pytest.mark.parametrize("number", ["4", "auto", "gpu"])
def test_kubeflow_when_a_node_is_several_ranks_then_torchrun_is_asked_for(number):
    environ = {**KUBEFLOW, "PET_NPROC_PER_NODE": number}
    with pytest.raises(Misuse, match=rf"a node of {number} ranks .* start `torchrun -m dure train"):
        read_launcher(environ)
    assert read_launcher({**environ, "PET_NNODES": "1", "PET_NODE_RANK": "0"}) is None
    assert read_launcher({**environ, **TORCHRUN}).by == "torchrun"


@pytest.mark.parametrize("outer", [SLURM, OPEN_MPI, KUBEFLOW])
def test_launchers_when_torchrun_runs_inside_of_one_then_it_is_torchruns_rank(outer):
    inner = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    assert read_launcher({**outer, **inner}).rank == RankInfo(world_size=4, local_world_size=2)


@pytest.mark.parametrize("outer", [SLURM, OPEN_MPI])
def test_launchers_when_torchruns_variables_are_written_by_hand_then_they_must_agree(outer):
    by_hand = {name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC")}
    assert read_launcher({**outer, **by_hand}).rank == ON_TWO_HOSTS
    some = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}  # what many batch scripts write
    assert read_launcher({**outer, **some}).rank == ON_TWO_HOSTS
    with pytest.raises(EnvironmentLacks, match=r"the environment mixes torchrun's variables .*RANK=0"):
        read_launcher({**outer, **by_hand, "RANK": "0", "LOCAL_RANK": "0"})
    with pytest.raises(EnvironmentLacks, match=r"the environment mixes .*RANK=0"):
        read_launcher({**outer, **some, "RANK": "0"})


def test_launchers_when_mpirun_runs_in_a_batch_script_then_it_is_mpiruns_rank():
    assert read_launcher({**SLURM, **OPEN_MPI, "SLURM_PROCID": "0"}).by == "mpirun"


@pytest.mark.parametrize("changes", [{"RANK": "4"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "5"}])
def test_launcher_when_numbers_cannot_be_then_they_are_refused(changes):
    with pytest.raises(EnvironmentLacks, match="torchrun's variables cannot be"):
        read_launcher({**TORCHRUN, **changes})


def test_rank_when_written_as_torchruns_variables_then_it_reads_as_itself():
    written = ON_TWO_HOSTS.to_environment()
    assert written == {name: value for name, value in TORCHRUN.items() if name in written}
    assert RankInfo.from_environment(written) == ON_TWO_HOSTS


# --- where they meet


def point(environ):
    return meeting_point(read_launcher(environ), environ)


def test_meeting_point_when_torchruns_agent_serves_the_store_then_nobody_else_does():
    found = point({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "mine"})
    assert (found.host, found.port, found.is_served, found.job) == ("one", 29500, True, "mine")
    assert not point(TORCHRUN).is_served


def test_meeting_point_when_slurm_lists_hosts_then_it_is_the_steps_first_and_a_port_of_the_job():
    found = point(SLURM)
    assert (found.host, found.other_host, found.is_port_given) == ("n1", "n2", False)
    assert found.port in PORTS
    assert found == point({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert found.port != point({**SLURM, "SLURM_STEP_ID": "1"}).port


def test_meeting_point_when_the_user_names_it_then_that_goes_first():
    found = point({**SLURM, "MASTER_ADDR": "n9", "MASTER_PORT": "1234"})
    assert (found.host, found.port) == ("n9", 1234)


def test_meeting_point_when_all_ranks_are_on_one_host_then_it_is_the_loopback_interface():
    on_one = {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "3", "SLURM_NODEID": "0"}
    assert point({**SLURM, **on_one}).host == "127.0.0.1"
    on_one = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert point({**OPEN_MPI, **on_one}).port in PORTS


def test_meeting_point_when_mpirun_runs_in_a_slurm_job_then_slurms_list_is_used():
    assert point({**OPEN_MPI, "SLURM_JOB_NODELIST": "n[4-5]"}).host == "n4"


@pytest.mark.parametrize("environ", [OPEN_MPI, {**RAY, "MASTER_PORT": "1"}, {**INDEXED, "MASTER_ADDR": ""}])
def test_meeting_point_when_nothing_tells_it_then_what_is_missing_is_said(environ):
    with pytest.raises(EnvironmentLacks, match="nothing says where they meet: set MASTER_ADDR for all of them"):
        point(environ)


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_meeting_point_when_the_port_is_none_then_it_is_refused(port):
    with pytest.raises(EnvironmentLacks, match=f"MASTER_PORT is '{port}' but must be a port"):
        point({**TORCHRUN, "MASTER_PORT": port})


def test_meeting_point_when_the_list_of_hosts_is_broken_then_master_addr_is_asked_for():
    with pytest.raises(EnvironmentLacks, match=r"brackets do not match\): set MASTER_ADDR"):
        point({**SLURM, "SLURM_STEP_NODELIST": "n[1-2"})


# --- Slurm's lists


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("one", ["one"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("n[08-10],login,gpu-[1]", ["n08", "n09", "n10", "login", "gpu-1"]),
        ("rack[0-1]n[1,3].example", ["rack0n1.example", "rack0n3.example", "rack1n1.example", "rack1n3.example"]),
    ],
)
def test_hosts_when_a_list_is_expanded_then_they_come_in_its_order(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-2", "n1]", "n[[1]]", "n[a-b]", "n[1-2],,m", f"n[0-{MOST_HOSTS}]", "[]"])
def test_hosts_when_it_is_no_list_then_it_is_refused(text):
    with pytest.raises(ValueError, match=r"list of|no host"):
        expand_hosts(text)


def test_tasks_on_node_when_a_list_is_repeated_then_each_node_has_its_own():
    assert [tasks_on_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="has no node 4"):
        tasks_on_node("2(x3),1", 4)
    with pytest.raises(ValueError, match="no list of tasks"):
        tasks_on_node("two", 0)
