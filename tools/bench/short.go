// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// The rows of the summary.
const (
	nothingChanged     = "one ADD, nothing changed since an earlier ADD"
	nothingChangedFull = "one ADD, nothing changed, 5,000 third-party rules"
	afterCommitShort   = "one ADD, after another program's commit to nf_tables"
	afterCommitFull    = "one ADD, after another program's commit, 5,000 third-party rules"
	concurrentFull     = "20 concurrent ADDs, 5,000 third-party rules, until the last ends"
	bridgeOne          = "plugin bridge with `ipMasq` instead of ip-masq, one ADD"
	bridgeOneFull      = "bridge with `ipMasq`, one ADD, 5,000 third-party rules"
	bridgeConcurrent   = "bridge with `ipMasq`, 20 concurrent ADDs, 5,000 third-party rules"
)

// summarize records a figure of a backend for the summary, in ms.
func (r *report) summarize(f scene.Backend, line string, ms measure.Series) {
	if r.short[line] == nil {
		r.short[line] = map[string]measure.Series{}
	}
	r.short[line][f.Name] = ms
}

// summary returns the table of the latency that ip-masq adds to a pod's start.
func (r *report) summary() string {
	if len(r.short) == 0 {
		return ""
	}
	head := []string{"ms more than with an empty plugin"}
	for _, f := range scene.Backends() {
		head = append(head, f.Name)
	}
	rows := [][]string{head}
	for _, line := range []string{nothingChanged, nothingChangedFull, afterCommitShort, afterCommitFull, concurrentFull, bridgeOne, bridgeOneFull, bridgeConcurrent} {
		if r.short[line] == nil {
			continue
		}
		row := []string{line}
		for _, f := range scene.Backends() {
			cell := "–"
			if s := r.short[line][f.Name]; s != nil {
				cell = measure.Short(s.Median())
			}
			row = append(row, cell)
		}
		rows = append(rows, row)
	}
	return "## Summary\n\n" + wrap(fmt.Sprintf("The table has the latency that ip-masq adds to the start of a pod with %d prefixes, compared with an empty plugin. "+
		"The rows of bridge compare bridge with and without `ipMasq`. The figures are medians; the sections below have "+
		"their intervals.", usual)) + "\n\n" + table(rows) + "\n"
}
