// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
)

// Seen is what the receiving host saw of a flow.
type Seen struct {
	// By is the name of that host.
	By string
	// Source is the source address and port of the flow.
	Source netip.AddrPort
	// Answered reports whether the answer arrived at the sender. With TCP it is always true.
	Answered bool
}

// answer returns the answer of a host to a peer: "outside 192.0.2.1:1024".
func answer(host *Host, source netip.AddrPort) []byte {
	return fmt.Appendf(nil, "%s %s\n", host.Name, source)
}

func parseAnswer(line string) (Seen, error) {
	name, address, _ := strings.Cut(strings.TrimSpace(line), " ")
	source, err := netip.ParseAddrPort(address)
	if err != nil {
		return Seen{}, fmt.Errorf("parse answer %q: %w", line, err)
	}
	return Seen{By: name, Source: source, Answered: true}, nil
}

// probe is the payload of a UDP packet that the observer recognizes. The observer passes it to the
// sink of its batch within this process, so no answer is needed.
type probe struct {
	batch uint32
	index uint32
	// silent probes ask for no answer.
	silent bool
}

// probeMagic is the prefix of a probe.
const (
	probeMagic  = "\x00imp"
	probeLength = len(probeMagic) + 4 + 4 + 1
)

func (p probe) append(b []byte) []byte {
	b = append(b, probeMagic...)
	b = binary.BigEndian.AppendUint32(b, p.batch)
	b = binary.BigEndian.AppendUint32(b, p.index)
	if p.silent {
		return append(b, 1)
	}
	return append(b, 0)
}

func parseProbe(payload []byte) (p probe, ok bool) {
	if len(payload) != probeLength || string(payload[:len(probeMagic)]) != probeMagic {
		return probe{}, false
	}
	rest := payload[len(probeMagic):]
	return probe{
		batch:  binary.BigEndian.Uint32(rest),
		index:  binary.BigEndian.Uint32(rest[4:]),
		silent: rest[8] != 0,
	}, true
}
