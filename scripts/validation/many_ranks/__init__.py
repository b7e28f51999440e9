"""Many ranks on one machine: what training waits for, faults that are injected, and a simulation of more ranks."""
