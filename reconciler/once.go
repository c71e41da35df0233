// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

func (a *app) onceCommand() *cobra.Command {
	return a.addOutput(&cobra.Command{
		Use:   "once",
		Short: "Make one pass: read the sources and make sure of the rules",
		Long: `Makes one pass: reads the conflists and agent files, puts what they state in force, and
makes sure of the rules. It may be run beside "run", and says what it did.

Exit codes: 0 the rules are what the sources ask for, 1 something stands in the way.`,
		Args: noArguments,
		RunE: a.once,
	})
}

func (a *app) once(c *cobra.Command, _ []string) error {
	node, err := a.node()
	if err != nil {
		return err
	}
	r := node.Sync(c.Context(), node.Read())
	if a.json() {
		err := a.print(answer{
			Result: r.Result, Right: r.Ready(), Drift: changesOf(r.Drift), Adopted: namesOf(r.Adopted), Pending: namesOf(r.Pending), Dropped: namesOf(r.Dropped),
			Stale: staleIn(r), Problems: problemsOf(r.Problems), Warnings: textsOf(r.Warnings),
		})
		if err == nil && !r.Ready() {
			err = notReady(len(r.Problems))
		}
		return err
	}
	for _, d := range r.Drift {
		fmt.Fprintf(a.out, "repaired: %v\n", d)
	}
	for _, s := range r.Adopted {
		fmt.Fprintf(a.out, "put in force: %s\n", s)
	}
	for _, s := range r.Dropped {
		fmt.Fprintf(a.out, "dropped: %s\n", s)
	}
	err = a.tell(r, r.Problems)
	if err == nil {
		fmt.Fprintln(a.out, summary(r))
	}
	return err
}

// summary says in one line what stands.
func summary(r *reconcile.Report) string {
	if chains := r.Summary(); chains != "" {
		return "right: " + chains
	}
	return "no source asks for a chain: nothing is managed"
}
