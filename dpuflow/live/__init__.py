"""Live capture: packets from interfaces of this machine, by eBPF, as pcapng blocks in memory."""
