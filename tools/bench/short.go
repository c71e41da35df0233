// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// The lines of what a reader wants to know first.
const (
	nothingChanged     = "an ADD, when nothing changed since another"
	nothingChangedFull = "the same beside 5,000 rules of others"
	otherChanged       = "an ADD, after others committed to nf_tables"
	otherChangedFull   = "that beside 5,000 rules of others"
	together           = "20 ADDs at once beside 5,000 rules, until the last has ended"
	bridgeOne          = "in its place, `ipMasq` of plugin bridge: an ADD"
	bridgeOneFull      = "`ipMasq` of bridge beside 5,000 rules"
	bridgeTogether     = "`ipMasq` of bridge, 20 at once beside 5,000 rules"
)

// shortly notes a figure of a form, in ms.
func (r *report) shortly(f scene.Form, line string, ms measure.Series) {
	if r.short[line] == nil {
		r.short[line] = map[string]measure.Series{}
	}
	r.short[line][f.Name] = ms
}

// inShort is the table of what a pod's start waits longer for.
func (r *report) inShort() string {
	if len(r.short) == 0 {
		return ""
	}
	head := []string{"ms longer than with an empty plugin"}
	for _, f := range scene.Forms() {
		head = append(head, f.Name)
	}
	rows := [][]string{head}
	for _, line := range []string{nothingChanged, nothingChangedFull, otherChanged, otherChangedFull, together, bridgeOne, bridgeOneFull, bridgeTogether} {
		if r.short[line] == nil {
			continue
		}
		row := []string{line}
		for _, f := range scene.Forms() {
			cell := "–"
			if s := r.short[line][f.Name]; s != nil {
				cell = measure.Short(s.Median())
			}
			row = append(row, cell)
		}
		rows = append(rows, row)
	}
	return fmt.Sprintf("## In short\n\nWhat a pod's start waits longer for than if an empty plugin stood in the place of ip-masq, with %d prefixes; and than without `ipMasq`, of bridge. "+
		"Medians; all that follows says how sure they are.\n\n%s\n", usual, table(rows))
}
