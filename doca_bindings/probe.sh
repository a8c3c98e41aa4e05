#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Ask the DOCA headers what release.h cannot be sure of: probe.sh COMPILER FLAGS... prints -D options.
set -u

has() { # macro, header, expression that compiles where the release has it
    if printf '#include <%s>\nvoid *probe(void);\nvoid *probe(void)\n{\n\treturn (void *)(unsigned long)%s;\n}\n' \
        "$2" "$3" | "$compiler" $flags -DDOCA_ALLOW_EXPERIMENTAL_API -w -fsyntax-only -xc - 2>/dev/null; then
        echo "-D$1=1"
    else
        echo "-D$1=0"
    fi
}

compiler=$1
shift
flags=$*
has OPAQUE_CONFIG doca_flow.h doca_flow_cfg_create
has BASIC_ADD_ENTRY doca_flow.h doca_flow_pipe_basic_add_entry
has ENTRY_FLAGS doca_flow.h DOCA_FLOW_ENTRY_FLAGS_NO_WAIT
