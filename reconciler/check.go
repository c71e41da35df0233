// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func (a *app) checkCommand() *cobra.Command {
	return a.addOutput(&cobra.Command{
		Use:   "check",
		Short: "Verify the rules and write nothing; exit code 3 for drift",
		Long: `Compares the rules in the kernel with what the conflists and agent files ask for, and
writes nothing. It prints each difference: what is missing, and what is there and should
not be. "ip-masq-reconciler once" removes them.

Exit codes: 0 the rules are right, 3 they differ, 1 nobody can say, or a source is bad.`,
		Args: noArguments,
		RunE: a.check,
	})
}

func (a *app) check(c *cobra.Command, _ []string) error {
	node, err := a.node()
	if err != nil {
		return err
	}
	r := node.Check(c.Context())
	var drift policy.Diff
	if r.Rules != nil {
		drift = r.Rules.Diff()
	}
	problems := r.Obstacles()
	if a.json() {
		err = a.print(answer{
			Right: !r.Differs() && len(problems) == 0, Drift: changesOf(drift), Adopted: []string{}, Pending: namesOf(r.Pending), Dropped: namesOf(r.Dropped),
			Stale: staleIn(r), Problems: problemsOf(problems), Warnings: textsOf(r.Warnings),
		})
		if err == nil && len(problems) > 0 {
			err = notReady(len(problems))
		}
	} else {
		err = a.tell(r, problems)
		for _, d := range drift {
			fmt.Fprintln(a.out, d)
		}
		for _, s := range staleIn(r) {
			fmt.Fprintf(a.out, "unexpected chain: %s: it is not wanted there any more\n", s)
		}
		for _, s := range r.Pending {
			fmt.Fprintf(a.out, "waiting: %s: what is stated now is not in force yet; ip-masq-reconciler once puts it in force\n", s)
		}
	}
	if r.Differs() {
		return errors.Join(err, errDrift)
	}
	if err == nil && !a.json() {
		fmt.Fprintln(a.out, summary(r))
	}
	return err
}
