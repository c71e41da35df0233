// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// mostDrift is how many differences people are shown; check shows all.
const mostDrift = 8

// Text writes the explanation for people: the verdict, then who said so, then
// what the kernel does and what to run. It does not report errors of w.
func (e Explanation) Text(w io.Writer) {
	var b bytes.Buffer
	b.WriteString(e.headline() + "\n")
	e.rows(&b)
	for _, other := range e.Chains {
		fmt.Fprintf(&b, "\nAnother chain by itself: %s\n", other.verdictText())
		other.rows(&b)
	}
	if todo := e.whatToDo(); todo != "" {
		fmt.Fprintf(&b, "\n%s\n", todo)
	}
	// Who reads this reads no more of it once the other end is gone.
	_, _ = w.Write(b.Bytes())
}

func (e Explanation) headline() string {
	text := e.Destination.String()
	if e.Source.IsValid() {
		text += " from " + e.Source.String()
	}
	if e.Interface != "" {
		text += " out of " + visible(e.Interface)
	}
	return text + ": " + e.verdictText()
}

func (e Explanation) verdictText() string {
	switch e.Verdict {
	case policy.OutcomeMasquerade:
		return "masqueraded"
	case policy.OutcomeExempt:
		return "exempt, keeps its source address"
	}
	return "out of scope, left alone"
}

func (e Explanation) rows(b *bytes.Buffer) {
	row := func(label, text string) {
		for line := range strings.Lines(text) {
			fmt.Fprintf(b, "  %-8s %s\n", label, strings.TrimSuffix(line, "\n"))
			label = ""
		}
	}
	if e.Chain != "" {
		row("chain", e.Chain+", "+string(e.Family)+e.keptIn())
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
	for _, c := range e.Contradicted {
		row("against", c)
	}
	row("kernel", e.kernelText())
	for i, h := range e.overriders[min(1, len(e.overriders)):] {
		if i+1 == mostDrift {
			row("", fmt.Sprintf("and %d more", len(e.overriders)-i-1))
			break
		}
		row("", "and by: "+h.Text)
	}
	row("problem", e.Problem)
	for i, d := range e.Drift {
		if i == mostDrift {
			row("", fmt.Sprintf("and %d more", len(e.Drift)-i))
			break
		}
		label := ""
		if i == 0 {
			label = "drift"
		}
		row(label, d)
	}
}

func (e Explanation) keptIn() string {
	if e.Backend == "" {
		return ""
	}
	return ", kept in " + e.Backend
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
		text += " in " + visible(o.File) + ", " + o.Source
	default:
		text += " of " + o.Source + ", stored; no file is known to say so now"
	}
	if o.Since.IsZero() {
		return text
	}
	text += ", in force since " + o.Since.UTC().Format("2006-01-02 15:04 UTC")
	if o.AgeSeconds > 0 {
		text += " (" + ageText(time.Duration(o.AgeSeconds)*time.Second) + ")"
	}
	return text
}

// ageText writes an age as people say it, in its largest unit.
func ageText(d time.Duration) string {
	for _, unit := range []struct {
		name string
		size time.Duration
	}{{"day", 24 * time.Hour}, {"hour", time.Hour}, {"minute", time.Minute}, {"second", time.Second}} {
		if n := d / unit.size; n > 1 {
			return fmt.Sprintf("%d %ss", n, unit.name)
		} else if n == 1 {
			return "1 " + unit.name
		}
	}
	return "no time"
}

func (e Explanation) kernelText() string {
	does := "leaves it alone"
	if e.found.masquerades {
		does = "masquerades it"
	}
	by := ", no rule of ours is reached"
	if e.Rule != "" {
		by = ", by the rule: " + e.Rule
	}
	switch {
	case len(e.overriders) > 0 && e.overriders[0].Sure:
		return "OVERRIDDEN by the rule: " + e.OverriddenBy
	case len(e.overriders) > 0:
		return "may be OVERRIDDEN by the rule: " + e.OverriddenBy
	case e.Chain == "" && e.Kernel:
		return "agrees: there is nothing of ours"
	case e.Chain == "":
		return "DISAGREES, or cannot be vouched for"
	case !e.found.known && e.Rule != "":
		return "cannot be vouched for; the first rule that it meets: " + e.Rule
	case !e.found.known:
		return "cannot be vouched for"
	case e.Kernel:
		return "agrees: " + does + by
	case e.agreesAlone():
		return "this chain agrees: " + does + by + "; the kernel as a whole does not, or cannot be vouched for"
	}
	return "DISAGREES: " + does + by
}

// agreesAlone reports whether the rules of this chain do what the policy says.
func (e Explanation) agreesAlone() bool {
	return e.found.known && e.found.masquerades == (e.Verdict == policy.OutcomeMasquerade)
}

// whatToDo tells what to run where something differs from what is desired.
func (e Explanation) whatToDo() string {
	drift, byHand := len(e.Drift) > 0, e.byHand
	for _, other := range e.Chains {
		drift, byHand = drift || len(other.Drift) > 0, byHand || other.byHand
	}
	switch {
	case e.incomplete:
		return "Nothing is repaired until these documents can be read."
	case byHand:
		return "To repair this: do what the difference says, then ip-masq-reconciler once. To see every difference: ip-masq-reconciler check."
	case drift || !e.Kernel && e.stale:
		return "To repair this: ip-masq-reconciler once. To see every difference: ip-masq-reconciler check."
	case e.OverriddenBy != "":
		return "To see what to do about such rules: ip-masq-reconciler doctor."
	case !e.Kernel:
		return "To see what is wrong: ip-masq-reconciler check."
	}
	return ""
}

// visible writes what others named: as it is where that is one line of visible
// text.
func visible(s string) string {
	const most = 256
	if len(s) > most || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) {
		return policy.Quote(s)
	}
	return s
}
