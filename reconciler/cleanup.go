// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

func (a *app) cleanup(c *cobra.Command, _ []string) error {
	node, err := a.node()
	if err != nil {
		return err
	}
	gone := newLeavings(node)
	err = gone.cleanUp(c.Context(), node)
	if a.json() {
		return errors.Join(err, a.print(gone))
	}
	if gone.tell(a); err == nil && !gone.any() {
		fmt.Fprintln(a.out, "nothing to remove")
	}
	return err
}

// leavings is what a cleanup removes.
type leavings struct {
	Removed  []removedChain `json:"removed"`
	Warnings []string       `json:"warnings"`
	DataDir  string         `json:"dataDir"`

	state bool // existed, and is removed
	stays bool // the directory, because it has other files
}

type removedChain struct {
	Chain   string `json:"chain"`
	Family  string `json:"family"`
	Backend string `json:"backend"`
}

func newLeavings(node *reconcile.Node) *leavings {
	return &leavings{Removed: []removedChain{}, Warnings: []string{}, DataDir: node.Dir.Path()}
}

// cleanUp removes rules and state, and adds what was removed.
func (l *leavings) cleanUp(ctx context.Context, node *reconcile.Node) error {
	_, before := os.Lstat(l.DataDir)
	var warnings []error
	removed, err := node.Cleanup(ctx, func(err error) {
		if err != nil {
			warnings = append(warnings, err)
		}
	})
	l.Removed = append(l.Removed, mapped(removed, func(r netfilter.OwnedChain) removedChain {
		return removedChain{r.Name, string(r.Family), r.Choice.String()}
	})...)
	l.Warnings = mapped(warnings, error.Error)
	if err != nil {
		return err
	}
	_, after := os.Lstat(l.DataDir)
	l.stays = after == nil
	l.state = l.state || before == nil || l.stays
	return nil
}

func (l *leavings) any() bool { return len(l.Removed) > 0 || l.state }

// tell prints what was removed.
func (l *leavings) tell(a *app) {
	warn(a, l.Warnings)
	for _, g := range l.Removed {
		fmt.Fprintf(a.out, "removed chain %s (%s) from %s\n", g.Chain, g.Family, g.Backend)
	}
	switch {
	case l.stays:
		fmt.Fprintf(a.out, "removed the state in %s, but not the directory: it has other files\n", l.DataDir)
	case l.state:
		fmt.Fprintf(a.out, "removed the state in %s\n", l.DataDir)
	}
}
