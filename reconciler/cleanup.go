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
	node, err := a.node(c.Context())
	if err != nil {
		return err
	}
	result := newCleanupResult(node)
	err = result.cleanUp(c.Context(), node)
	if a.json() {
		return errors.Join(err, a.print(result))
	}
	if result.printRemoved(a); err == nil && !result.removedAnything() {
		fmt.Fprintln(a.out, "nothing to remove")
	}
	return err
}

// cleanupResult is what a cleanup removed.
type cleanupResult struct {
	Removed  []removedChain `json:"removed"`
	Warnings []string       `json:"warnings"`
	DataDir  string         `json:"dataDir"`

	state bool // existed, and is removed
}

type removedChain struct {
	Chain   string `json:"chain"`
	Family  string `json:"family"`
	Backend string `json:"backend"`
}

func newCleanupResult(node *reconcile.Node) *cleanupResult {
	return &cleanupResult{Removed: []removedChain{}, Warnings: []string{}, DataDir: node.Dir.Path()}
}

// cleanUp removes rules and state, and adds what was removed.
func (r *cleanupResult) cleanUp(ctx context.Context, node *reconcile.Node) error {
	_, before := os.Lstat(r.DataDir)
	removed, err := node.Cleanup(ctx, func(err error) {
		if err != nil {
			r.Warnings = append(r.Warnings, err.Error())
		}
	})
	r.Removed = append(r.Removed, mapped(removed, func(o netfilter.OwnedChain) removedChain {
		return removedChain{o.Chain, string(o.Family), o.Choice.String()}
	})...)
	if err != nil {
		return err
	}
	r.state = r.state || before == nil
	return nil
}

func (r *cleanupResult) removedAnything() bool { return len(r.Removed) > 0 || r.state }

// printRemoved prints what was removed.
func (r *cleanupResult) printRemoved(a *app) {
	warn(a, r.Warnings)
	for _, g := range r.Removed {
		fmt.Fprintf(a.out, "removed chain %s (%s) from %s\n", g.Chain, g.Family, g.Backend)
	}
	if r.state {
		fmt.Fprintf(a.out, "removed the state in %s\n", r.DataDir)
	}
}
