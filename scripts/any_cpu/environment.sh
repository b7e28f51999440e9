# For demo.sh and test.sh to source, from the root of the repository: what has to be set before Python starts.
# Processes share the cores, and OpenMP threads that spin would take them from each other.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH="$PWD/scripts/any_cpu${PYTHONPATH:+:$PYTHONPATH}"
# uv installs sources: modules are compiled by the first process that imports them, and not by each one.
unset PYTHONDONTWRITEBYTECODE
# With torch for CUDA, a CUDA toolkit and no GPU, megatron-core looks for the GPU's architecture as it is imported.
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
# SIMULATE_CPU=avx2 makes any CPU behave as one that has AVX2, but neither AVX-512 nor BF16 instructions.
case "${SIMULATE_CPU:=}" in
  "") ;;
  avx2) export SIMULATE_CPU ATEN_CPU_CAPABILITY=avx2 NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES= ;;
  *) echo "SIMULATE_CPU is '$SIMULATE_CPU'; the only CPU that can be simulated is avx2" >&2; exit 2 ;;
esac
