// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// maxLines is how many differences, or rules, the text has; check prints all.
const maxLines = 8

// Text writes the explanation for people: the verdict, its origin, what the kernel does,
// and the command to run. It ignores errors of w.
func (e Explanation) Text(w io.Writer) {
	answer, todo := e.answer(), e.whatToDo()
	var others string // next hops with another answer
	for _, hop := range e.NextHops {
		if text := hop.answer(); text != answer {
			others += "\n" + hop.headline(true) + "\n" + text
		}
		todo = cmp.Or(todo, hop.whatToDo())
	}
	var b bytes.Buffer
	b.WriteString(e.headline(others != "" || !e.routed) + "\n")
	if e.Pod != nil {
		fmt.Fprintf(&b, "  %-8s %s\n", "pod", e.Pod)
	}
	if route := e.routeText(); route != "" {
		fmt.Fprintf(&b, "  %-8s %s\n", "route", route)
	}
	b.WriteString(answer + others)
	if todo != "" {
		fmt.Fprintf(&b, "\n%s\n", todo)
	}
	_, _ = w.Write(b.Bytes())
}

// routeText says which interfaces the routing table has for the traffic, where none was asked for.
func (e Explanation) routeText() string {
	switch {
	case e.routeErr != nil:
		return fmt.Sprintf("none in the routing table (%v), so the answer is for any interface in scope", e.routeErr)
	case !e.routed:
		return ""
	}
	text := "out of " + policy.Printable(e.Interface)
	for _, hop := range e.NextHops {
		text += " or " + policy.Printable(hop.Interface)
	}
	if len(e.NextHops) > 0 {
		return text + " (next hops in the routing table)"
	}
	return text + " (routing table)"
}

// answer is the rows of an explanation, and those of the other chains.
func (e Explanation) answer() string {
	var b bytes.Buffer
	e.rows(&b)
	for _, other := range e.Chains {
		fmt.Fprintf(&b, "\nAnother chain: %s\n", other.verdictText())
		other.rows(&b)
	}
	return b.String()
}

// headline is the traffic and its verdict.
func (e Explanation) headline(withInterface bool) string {
	text := e.Destination.String()
	if e.Source.IsValid() {
		text += " from " + e.Source.String()
	}
	if e.Interface != "" && withInterface {
		text += " out of " + policy.Printable(e.Interface)
	}
	return text + ": " + e.verdictText()
}

func (e Explanation) verdictText() string {
	switch e.Verdict {
	case policy.ActionMasquerade:
		return "masqueraded"
	case policy.ActionExempt:
		return "exempt, keeps its source address"
	}
	return "out of scope, not masqueraded"
}

func (e Explanation) rows(b *bytes.Buffer) {
	row := func(label, text string) {
		for line := range strings.Lines(text) {
			fmt.Fprintf(b, "  %-8s %s\n", label, strings.TrimSuffix(line, "\n"))
			label = ""
		}
	}
	if e.Chain != "" {
		text := e.Chain + ", " + string(e.Family)
		if e.Backend != "" {
			text += ", kept in " + e.Backend
		}
		row("chain", text)
	}
	if e.Prefix != nil {
		row("prefix", e.Prefix.String())
	}
	if e.Origin != nil {
		row("from", e.Origin.text())
	}
	for _, o := range e.Also {
		row("and from", o.text())
	}
	row("because", e.Reason)
	if e.Address.IsValid() {
		text := "pods leave with " + e.Address.String()
		if e.AddressInterface != "" {
			text += " by " + policy.Printable(e.AddressInterface)
		}
		row("address", text+": "+e.AddressItem.String()+" in "+e.AddressOrigin.text())
	}
	row("kernel", e.kernelText())
	row("", e.guardText())
	row("problem", e.Problem)
	row("drift", strings.Join(policy.First(maxLines, e.Drift), "\n"))
}

func (o Origin) text() string {
	text := o.Key
	if o.Index != nil {
		text += fmt.Sprintf("[%d]", *o.Index)
	}
	switch {
	case o.Kind == policy.BuiltIn:
		return text + ", " + o.Source
	case o.File != "":
		text += " in " + policy.Printable(o.File) + ", " + o.Source
	default:
		text += " of " + o.Source + " (stored)"
	}
	if o.Since != nil {
		text += ", in force since " + o.Since.UTC().Format("2006-01-02 15:04 UTC") + " (" + Age(o.age) + ")"
	}
	return text
}

// Age writes how long ago something was in at most two units: 42s, 5m, 3h12m, 4d3h.
func Age(d time.Duration) string {
	const day = 24
	d = max(d, 0)
	switch hours, minutes := int(d.Hours()), int(d.Minutes()); {
	case minutes == 0:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case hours == 0:
		return fmt.Sprintf("%dm", minutes)
	case hours < day:
		return fmt.Sprintf("%dh%dm", hours, minutes%60)
	default:
		return fmt.Sprintf("%dd%dh", hours/day, hours%day)
	}
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
	case len(e.overriders) > 0 && e.overriders[0].Sure:
		return "OVERRIDDEN by the rule: " + e.OverriddenBy
	case len(e.overriders) > 0:
		return "may be OVERRIDDEN by the rule: " + e.OverriddenBy
	case e.Chain == "" && e.Kernel:
		return "agrees: there are no owned rules"
	case !e.known && e.Rule != "":
		return "cannot be verified; the first rule that it meets: " + e.Rule
	case !e.known:
		return "cannot be verified"
	case e.Kernel:
		return "agrees: " + does + by
	case e.agrees():
		return "this chain agrees: " + does + by + "; the kernel as a whole does not, or cannot be verified"
	}
	return "DISAGREES: " + does + by
}

// guardText returns what guard and enforceExempt do.
func (e Explanation) guardText() string {
	switch {
	case e.Guard == policy.GuardDrop:
		return "and if no rule translates the packet: dropped by the guard"
	case e.Guard == policy.GuardCount:
		return "and if no rule translates the packet: counted by the guard"
	case len(e.held) > 0:
		return "enforceExempt holds against the rule: " + e.held[0].Text
	}
	return ""
}

// whatToDo returns the command to run if the kernel does not do what the policy says.
func (e Explanation) whatToDo() string {
	differs := len(e.Drift) > 0
	for _, other := range e.Chains {
		differs = differs || len(other.Drift) > 0
	}
	switch {
	case differs || !e.Kernel && e.OverriddenBy == "":
		return "To see every difference: ip-masq-reconciler check. To repair one that names no remedy: ip-masq-reconciler once.\n" +
			"If the difference returns, another program changes the rules: ip-masq-reconciler status names it."
	case !e.Kernel:
		return "To see what to do about such rules: ip-masq-reconciler doctor."
	}
	return ""
}
