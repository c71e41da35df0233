// SPDX-License-Identifier: Apache-2.0

package netfilter

import "fmt"

// Generation is a state of all that nf_tables keeps in one network namespace. At two
// equal moments of a boot the rules are the same, whoever wrote them: nobody
// committed anything in between. (After four thousand million commits the kernel
// begins anew; a node that makes a hundred a second takes sixteen months.)
type Generation struct {
	Namespace uint64 // the cookie of the namespace, by which no other goes in this boot; 0 is the first one
	// Load tells one life of the kernel's module from the next, which counts from
	// the beginning again; 0 where it is no module.
	ModuleLoad uint64
	Number     uint32 // of nf_tables, which each commit raises
}

// String writes namespace.load.generation.
func (m Generation) String() string {
	return fmt.Sprintf("%d.%d.%d", m.Namespace, m.ModuleLoad, m.Number)
}

// HasGeneration reports whether a Moment tells of changes to chains of this choice.
// Of the tables of iptables-legacy the kernel counts nothing.
func (c Choice) HasGeneration() bool { return c.Variant != VariantLegacy }
