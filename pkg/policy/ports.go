// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// PortRange is a range of transport ports, both ends included. The zero value
// means that no range was chosen.
type PortRange struct{ First, Last uint16 }

// Size returns how many ports the range holds.
func (r PortRange) Size() int { return int(r.Last) - int(r.First) + 1 }

// IsZero reports whether no range was chosen. (Port 0 cannot be.)
func (r PortRange) IsZero() bool { return r == PortRange{} }

// String writes the range as iptables does: "1024-29999", "7" for one port.
func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Ports is the value of toPorts: source ranges in the written order.
// None at all leaves the choice of ports to the kernel.
type Ports []PortRange

// ParsePorts reads "1024-29999,32768-65535". Empty text means no ranges.
func ParsePorts(s string) (Ports, error) {
	if s == "" {
		return Ports{}, nil
	}
	if n := 1 + strings.Count(s, ","); n > MaxPortRanges {
		return nil, fmt.Errorf("has %d ranges, more than the %d possible; write fewer that are wider", n, MaxPortRanges)
	}
	var ports Ports
	for part := range strings.SplitSeq(s, ",") {
		r, err := parsePortRange(part)
		if err != nil && part != s { // the message names the whole
			err = fmt.Errorf("holds %s, which %w", Quote(part), err)
		}
		if err != nil {
			return nil, err
		}
		ports = append(ports, r)
	}
	inOrder := ports.sorted()
	for i := 1; i < len(inOrder); i++ {
		if a, b := inOrder[i-1], inOrder[i]; b.First <= a.Last {
			return nil, fmt.Errorf("has overlapping ranges %s and %s; write each port once", a, b)
		}
	}
	return ports, nil
}

func parsePortRange(s string) (PortRange, error) {
	first, last, ranged := strings.Cut(s, "-")
	if !ranged {
		last = first
	}
	lo, errLo := parsePort(first)
	hi, errHi := parsePort(last)
	if err := errors.Join(errLo, errHi); err != nil {
		return PortRange{}, errors.New("is not a range of ports; write FIRST-LAST within 1-65535")
	}
	if lo > hi {
		return PortRange{}, fmt.Errorf("ends before it begins; did you mean %d-%d?", hi, lo)
	}
	return PortRange{First: lo, Last: hi}, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err == nil && (n == 0 || s != strconv.FormatUint(n, 10)) {
		err = strconv.ErrRange
	}
	return uint16(n), err
}

// String writes the ranges as they are configured.
func (p Ports) String() string {
	parts := make([]string, len(p))
	for i, r := range p {
		parts[i] = r.String()
	}
	return strings.Join(parts, ",")
}

// MarshalText implements encoding.TextMarshaler.
func (p Ports) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler with ParsePorts.
func (p *Ports) UnmarshalText(text []byte) (err error) {
	if *p, err = ParsePorts(string(text)); err != nil {
		return fmt.Errorf("%s %w", Quote(string(text)), err)
	}
	return nil
}

// sorted returns the ranges in ascending order, in which two values compare.
func (p Ports) sorted() Ports {
	return slices.SortedFunc(slices.Values(p), func(a, b PortRange) int { return int(a.First) - int(b.First) })
}
