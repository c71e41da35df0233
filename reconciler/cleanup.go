// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
)

func (a *app) cleanupCommand() *cobra.Command {
	return a.addOutput(&cobra.Command{
		Use:   "cleanup",
		Short: "Remove all that is ours: rules in every backend, and the state",
		Long: `Removes the chains, sets and tables that are ours, in every backend and family, and then
the dataDir. Pods that run keep running; what they send is not masqueraded any more.

A conflist that still has the entry brings the chain back with the next pod: remove it
first. It refuses to work while "run" does.`,
		Args: noArguments,
		RunE: a.cleanup,
	})
}

func (a *app) cleanup(c *cobra.Command, _ []string) error {
	node, err := a.node()
	if err != nil {
		return err
	}
	_, before := os.Lstat(node.Dir.Path())
	var warnings []error
	removed, err := node.Cleanup(c.Context(), func(err error) {
		if err != nil {
			warnings = append(warnings, err)
		}
	})
	type gone struct {
		Chain   string `json:"chain"`
		Family  string `json:"family"`
		Backend string `json:"backend"`
	}
	list := []gone{}
	for _, r := range removed {
		list = append(list, gone{r.Chain, string(r.Family), r.Choice.String()})
	}
	if a.json() {
		return errors.Join(err, a.print(map[string]any{"removed": list, "warnings": textsOf(warnings), "dataDir": node.Dir.Path()}))
	}
	for _, w := range warnings {
		fmt.Fprintf(a.err, "warning: %v\n", w)
	}
	for _, g := range list {
		fmt.Fprintf(a.out, "removed chain %s (%s) from %s\n", g.Chain, g.Family, g.Backend)
	}
	if err != nil {
		return err
	}
	_, after := os.Lstat(node.Dir.Path())
	switch {
	case after == nil:
		fmt.Fprintf(a.out, "removed the state in %s, but not the directory: it holds files of others\n", node.Dir.Path())
	case before == nil:
		fmt.Fprintf(a.out, "removed the state in %s\n", node.Dir.Path())
	case len(list) == 0:
		fmt.Fprintln(a.out, "nothing of ours is there")
	}
	return nil
}
