// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Text writes the explanation for people, and the command to run. It ignores errors of w.
func (e Explanation) Text(w io.Writer) {
	var b bytes.Buffer
	b.WriteString(e.headline() + "\n")
	if e.Pod != nil {
		fmt.Fprintf(&b, "  %-8s %s\n", "pod", e.Pod)
	}
	if route := e.routeText(); route != "" {
		fmt.Fprintf(&b, "  %-8s %s\n", "route", route)
	}
	e.rows(&b)
	for _, other := range e.Chains {
		fmt.Fprintf(&b, "\nAnother chain: %s\n", other.verdictText())
		other.rows(&b)
	}
	if todo := e.whatToDo(); todo != "" {
		fmt.Fprintf(&b, "\n%s\n", todo)
	}
	_, _ = w.Write(b.Bytes())
}

func (e Explanation) routeText() string {
	text := "out of " + policy.Printable(e.Interface)
	for _, hop := range e.NextHops {
		text += " or " + policy.Printable(hop)
	}
	switch {
	case e.routeErr != nil:
		const form = "none in the routing table (%v), so the answer is for any interface in scope"
		return fmt.Sprintf(form, e.routeErr)
	case !e.routed:
		return ""
	case len(e.NextHops) > 0:
		return text + " (next hops in the routing table); the answer is for " + policy.Printable(e.Interface)
	}
	return text + " (routing table)"
}

func (e Explanation) headline() string {
	text := e.Destination.String()
	if e.Source.IsValid() {
		text += " from " + e.Source.String()
	}
	if e.Interface != "" && !e.routed {
		text += " out of " + policy.Printable(e.Interface)
	}
	return text + ": " + e.verdictText()
}

func (e Explanation) verdictText() string {
	text := "out of scope, not masqueraded"
	switch e.Verdict {
	case policy.ActionMasquerade:
		text = "masqueraded"
	case policy.ActionExempt:
		text = "exempt, keeps its source address"
	}
	if e.noHook != "" {
		text += ", but ip-masq usually has no effect behind " + e.noHook
	}
	return text
}

func (e Explanation) rows(b *bytes.Buffer) {
	row := func(label, text string) {
		for line := range strings.Lines(text) {
			fmt.Fprintf(b, "  %-8s %s\n", label, strings.TrimSuffix(line, "\n"))
			label = ""
		}
	}
	if e.Chain != "" {
		kept := ""
		if e.Backend != "" {
			kept = ", kept in " + e.Backend
		}
		row("chain", e.Chain+", "+string(e.Family)+kept)
	}
	if e.Prefix != nil {
		row("prefix", e.Prefix.String())
	}
	if e.Origin != nil {
		row("from", e.Origin.text())
	}
	row("because", e.Reason)
	if e.Address.IsValid() {
		by := ""
		if e.AddressInterface != "" {
			by = " by " + policy.Printable(e.AddressInterface)
		}
		const form = "pods leave with %s%s: %s in %s"
		row("address", fmt.Sprintf(form, e.Address, by, e.AddressItem, e.AddressOrigin.text()))
	}
	row("kernel", e.kernelText())
	switch e.Guard {
	case policy.GuardDrop:
		row("", "and if no rule translates the packet: dropped by the guard")
	case policy.GuardCount:
		row("", "and if no rule translates the packet: counted by the guard")
	}
	if e.judged {
		row("mark", e.markText())
	}
	row("problem", e.Problem)
	row("drift", strings.Join(policy.First(8, e.Drift), "\n")) // check prints all
}

func (o Origin) text() string {
	text := o.Key
	if o.Index != nil {
		text += fmt.Sprintf("[%d]", *o.Index)
	}
	switch {
	case o.Kind == policy.BuiltIn && o.Key == "":
		return o.Source
	case o.Kind == policy.BuiltIn:
		return text + ", " + o.Source
	case o.File != "":
		text += " in " + policy.Printable(o.File) + ", " + o.Source
	default:
		text += " of " + o.Source + " (stored)"
	}
	if o.Since != nil {
		text += ", in force since " + o.Since.UTC().Format("2006-01-02 15:04 UTC")
		text += " (" + Age(time.Since(*o.Since)) + ")"
	}
	return text
}

// Age writes how long ago something was in at most two units: 42s, 5m, 3h12m, 4d3h.
func Age(d time.Duration) string {
	d = max(d, 0)
	switch hours := int(d.Hours()); {
	case hours >= 24:
		return fmt.Sprintf("%dd%dh", hours/24, hours%24)
	case d < time.Minute:
		return d.Truncate(time.Second).String()
	}
	return strings.TrimSuffix(d.Truncate(time.Minute).String(), "0s")
}

func (e Explanation) kernelText() string {
	does := "does not masquerade it"
	if e.masquerades {
		does = "masquerades it"
	}
	by := ", no owned rule matches"
	if e.Rule != "" {
		by = ", by the rule: " + e.Rule
	}
	switch {
	case e.noHook != "":
		return "is usually not asked: packets of pods behind " + e.noHook + " pass no hook of the node"
	case e.OverriddenBy != "" && e.isOverridden:
		return "overridden by " + e.OverriddenBy
	case e.OverriddenBy != "":
		return "may be overridden by " + e.OverriddenBy
	case e.Chain == "" && e.Kernel == thirdparty.Yes:
		return "agrees: there are no owned rules"
	case !e.known:
		return "cannot be verified"
	case e.Kernel == thirdparty.Yes:
		return "agrees: " + does + by
	case e.agrees():
		return "this chain agrees: " + does + by + "; the kernel as a whole does not, or cannot be verified"
	}
	return "DISAGREES: " + does + by
}

func (e Explanation) markText() string {
	if e.mark == 0 {
		return "the packet is taken to have none; --mark asks about another"
	}
	return e.mark.String()
}

func (e Explanation) whatToDo() string {
	if e.noHook != "" {
		return "To see what to do about it: ip-masq-reconciler doctor."
	}
	disagrees := e.Kernel != thirdparty.Yes
	switch {
	case e.drifts() || disagrees && e.OverriddenBy == "":
		return "To see every difference: ip-masq-reconciler check. " +
			"To repair one that names no remedy: ip-masq-reconciler once.\n" +
			"If the difference returns, another program changes the rules: ip-masq-reconciler status names it."
	case disagrees:
		return "To see what to do about such rules: ip-masq-reconciler doctor."
	}
	return ""
}

// drifts reports whether a chain differs.
func (e Explanation) drifts() bool {
	for _, other := range e.Chains {
		if len(other.Drift) > 0 {
			return true
		}
	}
	return len(e.Drift) > 0
}
