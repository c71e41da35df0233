// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func (a *app) whoCommand() *cobra.Command {
	var protocol, to string
	c := &cobra.Command{
		Use:   "who ADDRESS:PORT",
		Short: "Show which connection leaves with a source address and port",
		Args:  oneArgument("address and port, such as 203.0.113.1:40001"),
	}
	c.RunE = func(_ *cobra.Command, args []string) error {
		q, err := connectionQuery(args[0], protocol, to, c.Flags().Changed)
		if err != nil {
			return err
		}
		return a.who(c.Context(), q)
	}
	c.Flags().StringVar(&protocol, "protocol", "", "`PROTOCOL`: tcp, udp, sctp or icmp (default: each that has ports)")
	c.Flags().StringVar(&to, "to", "", "destination `ADDRESS` (default: any)")
	return c
}

// protocols are those that the command knows. ICMP has another number in IPv6.
func protocols(a netip.Addr) map[string]uint8 {
	icmp := uint8(unix.IPPROTO_ICMP)
	if a.Is6() {
		icmp = unix.IPPROTO_ICMPV6
	}
	return map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP, "icmp": icmp}
}

func connectionQuery(source, protocol, to string, given func(flag string) bool) (q conntrack.Query, err error) {
	from, err := netip.ParseAddrPort(source)
	if err != nil {
		return q, usageError{fmt.Errorf("ADDRESS:PORT: %s is not an address and a port; write 203.0.113.1:40001 or [2001:db8::1]:40001", policy.Quote(source))}
	}
	q.Source = netip.AddrPortFrom(from.Addr().Unmap().WithZone(""), from.Port())
	if given("protocol") {
		if q.Protocol = protocols(q.Source.Addr())[protocol]; q.Protocol == 0 {
			return q, usageError{fmt.Errorf("--protocol %q: write tcp, udp, sctp or icmp", protocol)}
		}
	}
	if given("to") {
		q.To, err = address("--to", to, q.Source.Addr())
		q.To = q.To.Unmap().WithZone("")
	}
	return q, err
}

// connection is one that leaves with the address and port. Its form in JSON is an interface of the program.
type connection struct {
	Protocol        string     `json:"protocol"`
	Source          netip.Addr `json:"source"`
	SourcePort      uint16     `json:"sourcePort"` // the identifier of ICMP
	Destination     netip.Addr `json:"destination"`
	DestinationPort *uint16    `json:"destinationPort"` // null for ICMP
	// Endpoint is what the packets reach: the destination, or what a Service chose.
	Endpoint     netip.Addr    `json:"endpoint"`
	EndpointPort *uint16       `json:"endpointPort"`
	SourceLocal  bool          `json:"sourceLocal"` // the node itself sends them
	Translated   bool          `json:"translated"`  // the source address or port
	Zone         uint16        `json:"zone"`        // of conntrack
	Pod          *diagnose.Pod `json:"pod"`         // that holds the source; null if none is known
	// Chain is the one whose policy decides such a connection now, and how; null where none has it in scope.
	Chain   *string       `json:"chain"`
	Verdict policy.Action `json:"verdict"`
}

func connectionOf(f conntrack.Found, d decision) connection {
	src, dst, endpoint := f.Original.Src, f.Original.Dst, f.Reply.Src
	c := connection{
		Source: src.Addr(), SourcePort: src.Port(),
		Destination: dst.Addr(), Endpoint: endpoint.Addr(),
		SourceLocal: f.SourceLocal, Translated: src != f.Reply.Dst, Zone: f.Zone,
		Chain: d.chain, Verdict: d.verdict,
	}
	for name, number := range protocols(src.Addr()) {
		if number == f.Original.Protocol {
			c.Protocol = name
		}
	}
	if c.Protocol != "icmp" {
		c.DestinationPort, c.EndpointPort = new(dst.Port()), new(endpoint.Port())
	}
	return c
}

type decision struct {
	chain   *string // nil if none has it in scope
	verdict policy.Action
}

// decide returns the decision of the first chain that masquerades, else of one that exempts.
func decide(policies []policy.Policy, packet policy.Packet) decision {
	found := decision{verdict: policy.ActionOutOfScope}
	for _, p := range policies {
		switch action := p.Decide(packet).Action; {
		case action == policy.ActionMasquerade:
			return decision{&p.Chain, action}
		case action == policy.ActionExempt && found.chain == nil:
			found = decision{&p.Chain, action}
		}
	}
	return found
}

func (a *app) who(ctx context.Context, q conntrack.Query) error {
	all := drivers()
	s, err := a.settings(ownersDataDir(ctx, all))
	var usage usageError
	if errors.As(err, &usage) || a.config != "" && errors.Is(err, fs.ErrNotExist) {
		return err
	}
	found, err := conntrack.Find(ctx, q)
	if err != nil {
		return err
	}
	node := open(s, all)
	e := node.Enforcer(node.Read(), func(error) {})
	state, err := e.Dir.Load()
	pods, _, podsErr := node.Dir.Pods()
	if err = cmp.Or(err, podsErr); err != nil {
		warn(a, []error{err})
	}
	policies := e.Policies(state)
	decisions := map[policy.Packet]decision{}
	connections := mapped(found, func(f conntrack.Found) connection {
		packet := policy.Packet{
			Src: f.Original.Src.Addr(), Dst: f.Reply.Src.Addr(), Out: f.Interface, SrcLocal: f.SourceLocal, DstLocal: f.EndpointLocal,
		}
		if _, known := decisions[packet]; !known {
			decisions[packet] = decide(policies, packet)
		}
		c := connectionOf(f, decisions[packet])
		c.Pod = diagnose.HolderOf(c.Source, pods)
		return c
	})
	if a.json() {
		err = a.print(map[string]any{"address": q.Source.Addr(), "port": q.Source.Port(), "connections": connections})
	} else {
		for _, c := range connections {
			c.text(a.out)
		}
	}
	for _, f := range slices.Concat(state.Newer, state.Damaged) { // the chain may be another
		warn(a, []error{f.Err})
	}
	if len(found) == 0 && err == nil {
		err = fmt.Errorf("no connection leaves with %s now; conntrack does not know connections that have ended\n"+
			"  To find them later, log them beforehand: conntrack -E -e DESTROY -o timestamp", q.Source)
	}
	return err
}

func (c connection) text(w io.Writer) {
	at := func(a netip.Addr, port *uint16) string {
		if port == nil {
			return a.String()
		}
		return netip.AddrPortFrom(a, *port).String()
	}
	to := at(c.Destination, c.DestinationPort)
	if endpoint := at(c.Endpoint, c.EndpointPort); endpoint != to {
		to += ", translated to " + endpoint
	}
	if c.DestinationPort == nil {
		fmt.Fprintf(w, "%s %s to %s, identifier %d\n", c.Protocol, c.Source, to, c.SourcePort)
	} else {
		fmt.Fprintf(w, "%s %s to %s\n", c.Protocol, at(c.Source, &c.SourcePort), to)
	}
	row := func(label string, value any) { fmt.Fprintf(w, "  %-8s %v\n", label, value) }
	if c.SourceLocal {
		row("from", "the node itself")
	}
	if c.Pod != nil {
		row("pod", c.Pod)
	}
	row("chain", c.chainText())
	if c.Zone != 0 {
		row("zone", c.Zone)
	}
}

func (c connection) chainText() string {
	const cause = ": it may be older than the policy, or another program decided"
	switch masquerades := c.Verdict == policy.ActionMasquerade; {
	case c.Chain == nil && c.Translated:
		return "none has such a connection in scope now; this one is translated" + cause
	case c.Chain == nil:
		return "none has it in scope, keeps its source address"
	case masquerades && (c.Translated || c.SourceLocal): // the node may masquerade with the address that it has
		return *c.Chain + ", masqueraded"
	case masquerades:
		return *c.Chain + " masquerades such a connection now; this one is not translated" + cause
	case c.Translated:
		return *c.Chain + " exempts such a connection now; this one is translated" + cause
	default:
		return *c.Chain + ", exempt, keeps its source address"
	}
}
