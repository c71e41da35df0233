// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// parseListing reads the output of `iptables -S`, by lines, into the chains
// that it declares. Its rules come out in order; what policy has no terms for
// becomes an alien.
func parseListing(lines []string) (map[string][]entry, error) {
	t := map[string][]entry{}
	for _, line := range wholeLines(lines) {
		words, err := split(line)
		if err != nil {
			return nil, fmt.Errorf("read the rule %s: %w", policy.Quote(line), err)
		}
		if len(words) < 2 {
			continue
		}
		switch chain := words[1].text; words[0].text {
		case "-P", "-N":
			if t[chain] == nil {
				t[chain] = []entry{}
			}
		case "-A":
			t[chain] = append(t[chain], parseRule(line, words[2:]))
		}
	}
	return t, nil
}

// wholeLines joins the lines of rules with a comment that goes over several:
// iptables prints the line feed as it is. Empty lines and the remarks that it
// mixes in are dropped.
func wholeLines(lines []string) []string {
	var out []string
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		for i+1 < len(lines) && inQuotes(line) {
			i++
			line += "\n" + lines[i]
		}
		out = append(out, line)
	}
	return out
}

// inQuotes reports whether a quotation is open at the end of the text.
func inQuotes(s string) bool {
	_, err := split(s)
	return errors.Is(err, errOpenQuote)
}

var errOpenQuote = errors.New("a quotation does not end")

// word is an argument of iptables; a quoted one is a value, whatever it says.
type word struct {
	text   string
	quoted bool
}

func (w word) is(option string) bool { return !w.quoted && w.text == option }

// split takes a rule apart as iptables-restore does: at white space, save in
// double quotes, where a backslash takes the next character as it is.
func split(line string) ([]word, error) {
	var words []word
	var b strings.Builder
	open, escaped, quoted := false, false, false
	end := func() {
		if b.Len() > 0 || quoted {
			words = append(words, word{b.String(), quoted})
		}
		b.Reset()
		quoted = false
	}
	for _, c := range []byte(line) {
		switch {
		case escaped:
			escaped = false
			b.WriteByte(c)
		case open && c == '\\':
			escaped = true
		case c == '"':
			open, quoted = !open, true
		case !open && (c == ' ' || c == '\t'):
			end()
		default:
			b.WriteByte(c)
		}
	}
	if open {
		return nil, errOpenQuote
	}
	end()
	return words, nil
}

// parseRule reads the arguments of an -A command. A word that is not known makes
// an alien; those after it are read all the same, for the chain it leads to.
func parseRule(line string, words []word) entry {
	var r reading
	statistic := false
	for i := 0; i < len(words); i++ {
		inverted := words[i].is("!")
		if inverted && i+1 < len(words) {
			i++
		}
		rest := words[i+1:]
		switch w := words[i]; {
		case w.quoted:
			r.refuse(w.text)
		case w.text == "--random-fully" && !inverted:
			r.rule.RandomFully = true
		case w.text == "-c" && len(rest) >= 2 && !inverted:
			line = strings.Replace(line, fmt.Sprintf(" -c %s %s", rest[0].text, rest[1].text), "", 1)
			r.count(rest[0].text)
			i += 2
		case inverted && w.text == "--src-type" && len(rest) >= 1 && rest[0].text == "LOCAL":
			r.rule.NotFromLocal = true
			i++
		case inverted && w.text == "--dst-type" && len(rest) >= 1 && rest[0].text == "LOCAL":
			r.rule.NotToLocal = true
			i++
		case inverted || len(rest) == 0:
			r.refuse(w.text)
		case r.option(w.text, rest[0].text):
			statistic = statistic || w.text == "-m" && rest[0].text == "statistic"
			i++
		default:
			r.refuse(w.text)
		}
	}
	if r.rule.Verdict != policy.Masquerade && (r.rule.RandomFully || !r.rule.Ports.IsZero()) {
		r.refuse("ports without MASQUERADE")
	}
	if statistic != r.share {
		r.refuse("a statistic match without a share")
	}
	return r.done(line)
}

// option reads an option with one argument, and returns false for one that it
// does not know.
func (r *reading) option(name, value string) bool {
	switch name {
	case "-s":
		r.address(&r.rule.From, parsePrefix(value), "source")
	case "-d":
		r.address(&r.rule.To, parsePrefix(value), "destination")
	case "-o":
		r.out(value)
	case "-p":
		r.protocol(protocolNumber(value))
	case "-m":
		if value != "comment" && value != "addrtype" && value != "statistic" {
			r.refuse("match " + value)
		}
	case "--comment":
		r.comment(value)
	case "--mode":
		if value != "random" {
			r.refuse("mode " + value)
		}
	case "--probability":
		r.random(parseProbability(value))
	case "--to-ports":
		r.ports(value)
	case "-j":
		r.parseTarget(value)
	case "-g":
		r.refuse("goto")
		r.jump(value)
	default:
		return false
	}
	return true
}

func (r *reading) count(packets string) {
	n, err := strconv.ParseUint(packets, 10, 64)
	if err != nil {
		r.refuse("-c")
	}
	r.rule.Connections = n
}

func (r *reading) parseTarget(name string) {
	switch name {
	case "RETURN":
		r.verdict(policy.Return)
	case "MASQUERADE":
		r.verdict(policy.Masquerade)
	default: // a chain or, to the same effect, a target that is none of ours
		r.jump(name)
	}
}

func (r *reading) ports(value string) {
	first, last, ranged := strings.Cut(value, "-")
	if !ranged {
		last = first
	}
	lo, errLo := strconv.ParseUint(first, 10, 16)
	hi, errHi := strconv.ParseUint(last, 10, 16)
	if errLo != nil || errHi != nil {
		r.refuse("--to-ports")
	}
	r.portRange(uint16(lo), uint16(hi))
}

// portRange notes the source ports of MASQUERADE.
func (r *reading) portRange(first, last uint16) {
	if first == 0 || first > last || !r.rule.Ports.IsZero() {
		r.refuse("ports that cannot be")
		return
	}
	r.rule.Ports = policy.PortRange{First: first, Last: last}
}

// parsePrefix reads a prefix, or a bare address as some versions print it. The
// invalid prefix stands for what is neither, such as 10.0.0.0/255.0.255.0.
func parsePrefix(s string) netip.Prefix {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		return netip.PrefixFrom(a, a.BitLen())
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}

// protocolNumber reads a protocol, by the name that iptables gives it or by
// number. It returns -1 for one that is not known.
func protocolNumber(s string) int {
	if n, err := strconv.ParseUint(s, 10, 8); err == nil {
		return int(n)
	}
	numbers := map[string]int{"tcp": 6, "udp": 17, "sctp": 132}
	if n, known := numbers[s]; known {
		return n
	}
	return -1
}

// parseProbability reads a probability as libxt_statistic does, into
// policy.ShareUnit; it returns 0 for what is none.
func parseProbability(s string) uint32 {
	p, err := strconv.ParseFloat(s, 64)
	if err != nil || !(p >= 0 && p <= 1) {
		return 0
	}
	return uint32(math.Round(p * policy.ShareUnit))
}
