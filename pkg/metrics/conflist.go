// SPDX-License-Identifier: Apache-2.0

package metrics

import "github.com/ip-masq/ip-masq-cni/pkg/reconcile"

// Conflist is how it stands with our entry in the conflist, told by who keeps it
// there.
type Conflist struct {
	Present  bool // it is there
	Flapping bool // somebody removes it again and again
	Wrote    bool // it was put in just now
	// Problems are why the node is not ready.
	Problems []reconcile.Problem
}

// Conflist takes note of the conflist; nil says that nobody here keeps our entry
// in it, and then passes tell whether it is there.
func (m *Monitor) Conflist(c *Conflist) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.managed = c
	if c != nil && c.Wrote {
		m.entries.Inc()
	}
}
