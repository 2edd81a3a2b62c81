"""Edits that let Horovod compile here: newer compilers, Pythons and torch, and what torch needs."""

from __future__ import annotations

from hvdtrain.horovod_build.edits.edit import Edit

# Paths of the libraries of torch, of NVIDIA's wheels beside it, and of PyPI's Open MPI, relative to
# the wheel's folder (site-packages/horovod/torch/), so that the cached wheel works in any
# environment.
LIBRARIES = ("torch/lib", "nvidia/nccl/lib", "nvidia/cu13/lib", "nvidia/cuda_runtime/lib", "../..")
RELATIVE_RPATH = ";".join(rf"\$ORIGIN/../../{folder}" for folder in LIBRARIES)

_NEWER_GCC = "gcc 13 and newer do not include it by way of other headers"
_FIND_CUDA = (
    "import torch; from torch.utils.cpp_extension import {0}_HOME; print(True if "
    "((torch.version.{1} is not None) and ({0}_HOME is not None)) else False)"
)
_CHOSEN = "import os; print(os.environ.get('HOROVOD_GPU') == '{0}')"

CMAKE = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n",
        "set(CMAKE_CXX_STANDARD $ENV{HVDTRAIN_CXX_STANDARD})\n"
        "set(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        f'set(CMAKE_INSTALL_RPATH "{RELATIVE_RPATH}")\n',
        "torch's headers need C++17, from torch 2.14 on C++20; the libraries are found wherever "
        "the wheel is installed",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "    set(CMAKE_CXX_STANDARD 14)\n",
        "    set(CMAKE_CXX_STANDARD $ENV{HVDTRAIN_CXX_STANDARD})\n",
        "torch's headers need C++17, from torch 2.14 on C++20",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "SHARED ${SOURCES} ${PYTORCH_SOURCES})",
        "SHARED ${PYTORCH_SOURCES} ${SOURCES})",
        "the two files that take longest to compile begin first",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_paths()['include'])",
        "Python 3.12 and newer have no distutils",
    ),
)

SOURCES_AND_LIBRARIES = (
    Edit(
        "horovod/common/common.h",
        "#include <memory>\n#include <string>\n#include <unordered_map>\n",
        "#include <memory>\n#include <stdexcept>\n#include <string>\n#include <unordered_map>\n",
        f"it uses std::logic_error; {_NEWER_GCC}",
    ),
    Edit(
        "horovod/common/group_table.h",
        "#include <queue>\n#include <unordered_map>\n",
        "#include <queue>\n#include <string>\n#include <unordered_map>\n",
        f"it uses std::string; {_NEWER_GCC}",
    ),
    Edit(
        "third_party/gloo/gloo/types.h",
        "#include <iostream>\n",
        "#include <cstdint>\n#include <iostream>\n",
        f"it uses uint8_t; {_NEWER_GCC}",
    ),
    Edit(
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        "  const size_type count_;\n",
        "  size_type count_;\n",
        "an assignment in the same class changes it, which gcc 14 refuses",
    ),
    Edit(
        "setup.py",
        "if not os.environ.get('HOROVOD_WITHOUT_PYTORCH'):\n"
        "    require_list.append('cffi>=1.4.0')\n",
        "",
        "nothing uses cffi",
    ),
    Edit(
        "setup.py",
        "      setup_requires=require_list if is_build_action() else [],\n",
        "",
        "setuptools would install these from an index, which a machine without a network has not",
    ),
    Edit(
        "setup.py",
        "cmake_build_args = ['--config', config]\n",
        "cmake_build_args = ['--config', config, '--target', 'pytorch']\n",
        "what torch does not use is left out: kernels and a Gloo for the other C++ ABI",
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        _FIND_CUDA.format("CUDA", "cuda"),
        _CHOSEN.format("CUDA"),
        "a torch with CUDA is also used on CPUs, where there may be no CUDA to build with",
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        _FIND_CUDA.format("ROCM", "hip"),
        _CHOSEN.format("ROCM"),
        "a torch with ROCm is also used on CPUs",
    ),
    Edit(
        "cmake/Modules/FindNCCL.cmake",
        '    set(NCCL_LIBNAME "nccl")\n',
        '    set(NCCL_LIBNAME "libnccl.so.2" "nccl")\n',
        "the NCCL beside torch's wheels has no libnccl.so, only libnccl.so.2",
    ),
    Edit(
        "horovod/torch/cuda_util.cc",
        'dlopen("libcuda.so", RTLD_LAZY)',
        'dlopen("libcuda.so.1", RTLD_LAZY)',
        "libcuda.so belongs to the development package; drivers in containers have libcuda.so.1",
    ),
)

RELEASE = (
    Edit(
        "setup.py",
        "'RelWithDebInfo'",
        "'Release'",
        "debug symbols are 60 of the library's 62 MB, and a third of the build's time",
    ),
)
