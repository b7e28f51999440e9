"""torchtitan's real trainer on a CPU, with and without a monitor: `scripts/validation/titan/run.sh`."""
