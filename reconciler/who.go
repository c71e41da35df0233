// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"

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
		Args:  cobra.ExactArgs(1),
	}
	c.RunE = func(_ *cobra.Command, args []string) error {
		q, err := connectionQuery(args[0], protocol, to, c.Flags().Changed)
		if err != nil {
			return err
		}
		return a.who(c.Context(), q)
	}
	c.Flags().StringVar(&protocol, "protocol", "", "`PROTOCOL`: tcp, udp or sctp (default: each)")
	c.Flags().StringVar(&to, "to", "", "destination `ADDRESS` (default: any)")
	return c
}

func protocols() map[string]uint8 {
	return map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}
}

func connectionQuery(
	source, protocol, to string, given func(flag string) bool,
) (q conntrack.Query, err error) {
	from, err := netip.ParseAddrPort(source)
	if err != nil {
		const form = "ADDRESS:PORT: %s is not an address and a port; " +
			"write 203.0.113.1:40001 or [2001:db8::1]:40001"
		return q, usagef(form, policy.Quote(source))
	}
	q.Source = netip.AddrPortFrom(from.Addr().Unmap().WithZone(""), from.Port())
	if given("protocol") {
		q.Protocol = protocols()[protocol]
		if q.Protocol == 0 {
			return q, usagef("--protocol %q: write tcp, udp or sctp", protocol)
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
	SourcePort      uint16     `json:"sourcePort"`
	Destination     netip.Addr `json:"destination"`
	DestinationPort uint16     `json:"destinationPort"`
	// Endpoint is what packets reach: the destination, or what a Service chose.
	Endpoint     netip.Addr    `json:"endpoint"`
	EndpointPort uint16        `json:"endpointPort"`
	SourceLocal  bool          `json:"sourceLocal"` // the node itself sends them
	Translated   bool          `json:"translated"`  // the source address or port
	Zone         uint16        `json:"zone"`        // of conntrack
	Pod          *diagnose.Pod `json:"pod"`         // that holds the source; null if none is known
	// Chain is the one whose policy decides now; null where none has it in scope.
	Chain   *string       `json:"chain"`
	Verdict policy.Action `json:"verdict"`
}

// connectionOf has the decision of the first chain that masquerades, else of one that exempts.
func connectionOf(f conntrack.Found, policies []policy.Policy) connection {
	src, dst, endpoint := f.Original.Src, f.Original.Dst, f.Reply.Src
	c := connection{
		Source: src.Addr(), SourcePort: src.Port(),
		Destination: dst.Addr(), DestinationPort: dst.Port(),
		Endpoint: endpoint.Addr(), EndpointPort: endpoint.Port(),
		SourceLocal: f.SourceLocal, Translated: src != f.Reply.Dst, Zone: f.Zone,
		Verdict: policy.ActionOutOfScope,
	}
	for name, number := range protocols() {
		if number == f.Original.Protocol {
			c.Protocol = name
		}
	}
	packet := policy.Packet{
		Src: src.Addr(), Dst: endpoint.Addr(), Out: f.Interface,
		SrcLocal: f.SourceLocal, DstLocal: f.EndpointLocal,
	}
	for _, p := range policies {
		action := p.Decide(packet).Action
		isFirstMasquerade := action == policy.ActionMasquerade && c.Verdict != action
		isFirst := action == policy.ActionExempt && c.Chain == nil
		if isFirstMasquerade || isFirst {
			c.Chain, c.Verdict = &p.Chain, action
		}
	}
	return c
}

func (a *app) who(ctx context.Context, q conntrack.Query) error {
	node, err := a.node(ctx)
	if _, is := errors.AsType[usageError](err); is {
		return err
	}
	found, err := conntrack.Find(ctx, q)
	if err != nil {
		return err
	}
	e := node.Enforcer(node.Read(), ignoreWarning)
	state, err := e.Dir.Load()
	if err != nil {
		return err // without documents each verdict would be wrong
	}
	pods, _, podsErr := node.Dir.Pods()
	if podsErr != nil {
		warn(a, []error{podsErr})
	}
	policies := e.Policies(state)
	connections := []connection{}
	for _, f := range found {
		c := connectionOf(f, policies)
		c.Pod = diagnose.HolderOf(c.Source, pods)
		connections = append(connections, c)
	}
	if a.json() {
		err = a.print(map[string]any{
			"address": q.Source.Addr(), "port": q.Source.Port(), "connections": connections,
		})
	} else {
		for _, c := range connections {
			c.text(a.out)
		}
	}
	for _, f := range state.Unreadable { // the chain may be another
		warn(a, []error{f.Err})
	}
	if len(found) == 0 && err == nil {
		err = fmt.Errorf("no connection leaves with %s now; "+
			"conntrack does not know connections that have ended\n"+
			"  To find them later, log them beforehand: conntrack -E -e DESTROY -o timestamp", q.Source)
	}
	return err
}

func (c connection) text(w io.Writer) {
	to := netip.AddrPortFrom(c.Destination, c.DestinationPort).String()
	endpoint := netip.AddrPortFrom(c.Endpoint, c.EndpointPort).String()
	if endpoint != to {
		to += ", translated to " + endpoint
	}
	fmt.Fprintf(w, "%s %s to %s\n", c.Protocol, netip.AddrPortFrom(c.Source, c.SourcePort), to)
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
	masquerades := c.Verdict == policy.ActionMasquerade
	text := "none has it in scope, keeps its source address"
	switch {
	case c.Chain != nil && masquerades:
		text = *c.Chain + ", masqueraded"
	case c.Chain != nil:
		text = *c.Chain + ", exempt, keeps its source address"
	}
	mayKeepAddress := masquerades && c.SourceLocal // the node may masquerade with the address that it has
	if c.Translated == masquerades || mayKeepAddress {
		return text
	}
	is := "is not translated"
	if c.Translated {
		is = "is translated"
	}
	return text + "; this connection " + is + ": it may be older than the policy, or another program decided"
}
