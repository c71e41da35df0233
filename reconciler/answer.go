// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// answer is a report in the form of `-o json`.
type answer struct {
	Result   reconcile.Result `json:"result,omitempty"` // of a pass that may write
	Right    bool             `json:"right"`
	Drift    []change         `json:"drift"`
	Adopted  []string         `json:"adopted"` // sources whose statement was put in force
	Pending  []string         `json:"pending"` // sources that state something else than is in force
	Dropped  []string         `json:"dropped"`
	Stale    []string         `json:"stale"` // chains that nobody wants any more
	Problems []problem        `json:"problems"`
	Warnings []string         `json:"warnings"`
}

type change struct {
	Kind       policy.ChangeKind `json:"kind"`
	Family     policy.Family     `json:"family"`
	Chain      string            `json:"chain,omitempty"`
	Unexpected bool              `json:"unexpected"` // it is there and should not be; else it is missing
	Text       string            `json:"text"`
}

type problem struct {
	Topic   reconcile.Reason `json:"reason"`
	Source  string           `json:"source,omitempty"`
	Chain   string           `json:"chain,omitempty"`
	Message string           `json:"message"`
}

func changesOf(d policy.Diff) []change {
	out := []change{}
	for _, c := range d {
		out = append(out, change{c.Kind, c.Family, c.Chain, c.Unexpected, c.Text})
	}
	return out
}

func problemsOf(list []reconcile.Problem) []problem {
	out := []problem{}
	for _, p := range list {
		one := problem{Topic: p.Reason, Chain: p.Chain, Message: p.Err.Error()}
		if p.Source != (policy.SourceID{}) {
			one.Source = p.Source.String()
		}
		out = append(out, one)
	}
	return out
}

func namesOf(sources []policy.SourceID) []string {
	out := []string{}
	for _, s := range sources {
		out = append(out, s.String())
	}
	return out
}

func staleIn(r *reconcile.Report) []string {
	out := []string{}
	if r.Rules != nil {
		for _, o := range r.Rules.Stale {
			place := netfilter.Choice{Backend: o.Backend, Variant: o.Variant}
			out = append(out, fmt.Sprintf("%s (%s, %s)", o.Chain, o.Family, place))
		}
		for _, at := range r.Rules.Duplicates {
			out = append(out, fmt.Sprintf("%s (%s)", at.Chain, at.Choice))
		}
		if r.Rules.ReplaceOtherDataDirs {
			for _, o := range r.Rules.OtherDataDirs {
				out = append(out, fmt.Sprintf("%s (%s, %s)", o.Name, o.Family, o.Choice))
			}
		}
	}
	return out
}

func textsOf(errs []error) []string {
	out := []string{}
	for _, err := range errs {
		out = append(out, err.Error())
	}
	return out
}

// notReady ends a command whose output has the problems.
func notReady(problems int) error {
	if problems == 1 {
		return errors.New("not ready: the output has the problem")
	}
	return fmt.Errorf("not ready: the output has the %d problems", problems)
}

// tell writes warnings and problems for people, and returns the problems as one
// error.
func (a *app) tell(r *reconcile.Report, problems []reconcile.Problem) error {
	for _, w := range r.Warnings {
		fmt.Fprintf(a.err, "warning: %v\n", w)
	}
	var errs []error
	for _, p := range problems {
		errs = append(errs, p.Err)
	}
	return errors.Join(errs...)
}
