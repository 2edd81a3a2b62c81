"""Edits of horovodrun: the Python, the shell and the connections by which it starts workers."""

from __future__ import annotations

from hvdtrain.horovod_build.edits.edit import Edit

_ANY_SHELL = (
    "the login shell on another host may be csh, fish or rbash, which change such a command"
)
_ONE_CONNECTION = (
    "one ssh a worker, all at once, is more than sshd lets in (MaxStartups): 9 of 32 are refused"
)

PYTHON = (
    Edit(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable\n",
        "from shutil import which as find_executable\n",
        "Python 3.12 and newer have no distutils, and horovodrun imports this file",
    ),
    Edit(
        "horovod/runner/launch.py",
        "def run_commandline():\n",
        "def run_commandline():\n"
        "    from multiprocessing import util\n"
        "    flags = util._args_from_interpreter_flags\n"
        "    util._args_from_interpreter_flags = lambda: ['-I', *flags()]\n\n",
        "each worker is started by a process of multiprocessing, a python -c, which would import a "
        "user's signal.py from the working folder; it is handed horovodrun's own path",
    ),
)

HOSTS = (
    Edit(
        "horovod/runner/util/remote.py",
        "from horovod.runner.common.util import env as env_util\n",
        "import shlex\n\nfrom horovod.runner.common.util import env as env_util\n"
        "from horovod.runner.util.any_shell import for_any_shell\n",
        _ANY_SHELL,
    ),
    Edit(
        "horovod/runner/util/remote.py",
        "def get_ssh_command(local_command, host, port=None, identity_file=None, "
        "timeout_s=None):\n",
        """\
def get_ssh_command(local_command, host, port=None, identity_file=None, timeout_s=None):
    command = for_any_shell(' '.join(shlex.split(local_command)))
    return open_ssh_command(shlex.quote(command), host, port, identity_file, timeout_s)


def open_ssh_command(local_command, host, port=None, identity_file=None, timeout_s=None):
""",
        _ANY_SHELL,
    ),
    Edit(
        "horovod/runner/driver/driver_service.py",
        "            '{python} -m horovod.runner.task_fn {index} {num_hosts} ' \\\n",
        "            'cd / ; {python} -m horovod.runner.task_fn {index} {num_hosts} ' \\\n",
        "it would import a user's signal.py from the home folder of the other host",
    ),
    Edit(
        "horovod/runner/driver/driver_service.py",
        "            command = get_remote_command(command,\n",
        "            command = get_remote_command(shlex.quote(command),\n",
        _ANY_SHELL,
    ),
    Edit(
        "horovod/runner/driver/driver_service.py",
        "import os\nimport sys\n",
        "import os\nimport shlex\nimport sys\n",
        _ANY_SHELL,
    ),
    # Open MPI writes commands for the local user's shell. sh takes all of them but those for csh.
    Edit(
        "horovod/runner/mpi_run.py",
        "    # Execute the mpirun command.\n",
        """\
    try:
        local_shell = pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        local_shell = ''
    agent = os.path.join(os.path.dirname(__file__), 'util', 'any_shell.py')
    if not local_shell.endswith('csh') and ' ' not in sys.executable + agent:
        env = copy.copy(env)
        env.setdefault('OMPI_MCA_plm_rsh_agent', f'{sys.executable} -I -S {agent}')

    # Execute the mpirun command.
""",
        _ANY_SHELL,
    ),
    Edit(
        "horovod/runner/mpi_run.py",
        "import copy\n",
        "import copy\nimport pwd\n",
        _ANY_SHELL,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        "from horovod.runner.util.remote import get_remote_command\n",
        "from horovod.runner.util.host_connection import HostConnections\n"
        "from horovod.runner.util.remote import get_remote_command\n",
        _ONE_CONNECTION,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        "    terminate_all_event = None if settings.elastic else threading.Event()\n",
        "    terminate_all_event = None if settings.elastic else threading.Event()\n"
        "    connections = HostConnections(settings.ssh_port, settings.ssh_identity_file)\n",
        _ONE_CONNECTION,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        "        index = slot_info.rank\n",
        "        index = slot_info.rank\n        execute = safe_shell_exec.execute\n",
        _ONE_CONNECTION,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        "import errno\n",
        "import errno\nimport functools\n",
        _ONE_CONNECTION,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        """\
            local_command = quote('cd {pwd} > /dev/null 2>&1 ; {command}'
                                  .format(pwd=os.getcwd(), command=command))
            command = get_remote_command(local_command,
                                         host=host_name,
                                         port=settings.ssh_port,
                                         identity_file=settings.ssh_identity_file)
""",
        """\
            command = 'cd {pwd} > /dev/null 2>&1 ; exec {command}'.format(
                pwd=quote(os.getcwd()), command=command)
            if env_util.is_kubeflow_mpi():
                command = get_remote_command(quote(command), host=host_name)
            else:
                execute = functools.partial(connections.execute, host_name)
""",
        _ONE_CONNECTION,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        "            exit_code = safe_shell_exec.execute(command,\n" + 48 * " " + "index=index,\n",
        "            exit_code = execute(command,\n" + 48 * " " + "index=index,\n",
        _ONE_CONNECTION,
    ),
)

_ASK = """\
def {0}_built(verbose=False):
    for ext_base_name in EXTENSIONS:
        built_fn = lambda ext: ext.{0}_built()
        result = _check_extension_lambda(
            ext_base_name, built_fn, 'built with {1}', verbose)
        if result is not None:
            return result
    return None
"""
_KNOW = "def {}_built(verbose=False):\n    return {}\n"
_BOTH = "{}\n\n@_cache\n{}"


def built_controllers(has_mpi: bool) -> Edit:
    """Return the edit by which a build answers whether it has MPI, and Gloo."""
    return Edit(
        "horovod/common/util.py",
        _BOTH.format(_ASK.format("mpi", "MPI"), _ASK.format("gloo", "Gloo")),
        _BOTH.format(_KNOW.format("mpi", has_mpi), _KNOW.format("gloo", True)),
        "horovodrun would import torch, for seconds, to learn whether this wheel has MPI and Gloo",
    )
