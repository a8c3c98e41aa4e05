"""Traffic of scripted GPU jobs: a scenario in, captures with known truth out (docs/synth.md).

The simulator shares the tables of wire formats (``dpuflow.wire.headers``) and the errors with the rest of the
package, and nothing else: what reads captures must not be able to know what wrote them.
"""
