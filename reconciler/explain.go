// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func (a *app) explainCommand() *cobra.Command {
	var from, pod, out, mark string
	c := &cobra.Command{
		Use:   "explain DST",
		Short: "Show the verdict for traffic to an address, and its origin",
		Args:  cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			q, err := question(args[0], from, pod, out, c.Flags().Changed)
			if err != nil {
				return err
			}
			if c.Flags().Changed("mark") {
				if q.Mark, err = policy.ParseMark(mark); err != nil {
					return usageError{fmt.Errorf("--mark: %s is not a mark; write a 32-bit number such as 0x4000", policy.Quote(mark))}
				}
			}
			return a.explain(c, q, pod)
		},
	}
	c.Flags().StringVar(&from, "from", "", "source `ADDRESS` (default: any in scope)")
	c.Flags().StringVar(&pod, "pod", "", "source pod, as `NAMESPACE/NAME`")
	c.Flags().StringVar(&out, "out", "", "output `INTERFACE` (default: that of the route, or any in scope)")
	c.Flags().StringVar(&mark, "mark", "", "packet `MARK` that third-party rules see (default: none)")
	return c
}

// question reads the arguments. An empty flag is most likely a shell variable that is not set.
func question(dst, from, pod, out string, given func(flag string) bool) (q diagnose.Question, err error) {
	q.Dst, err = address("DST", dst, netip.Addr{})
	if err == nil && given("from") {
		q.Src, err = address("--from", from, q.Dst)
	}
	namespace, name, _ := strings.Cut(pod, "/")
	q.Out = out
	switch {
	case err != nil:
		return q, err
	case given("pod") && given("from"):
		return q, usageError{errors.New("--pod and --from both state the source; leave one out")}
	case given("pod") && (namespace == "" || name == ""):
		return q, usageError{fmt.Errorf("--pod %s: write NAMESPACE/NAME, such as default/web-0", policy.Quote(pod))}
	case given("out") && out == "":
		return q, usageError{errors.New("--out: is empty; write the name of an interface, or leave the flag out")}
	case given("out") && (policy.ValidateInterface(out) != nil || strings.HasSuffix(out, "+")):
		return q, usageError{fmt.Errorf("--out %s: is not the name of an interface; write one such as eth0", policy.Quote(out))}
	}
	return q, nil
}

// address parses an address of the family of another one, if that is valid.
func address(what, text string, other netip.Addr) (netip.Addr, error) {
	addr, err := netip.ParseAddr(text)
	if err != nil {
		return addr, usageError{fmt.Errorf("%s: %s is not an address; write one such as 10.1.2.3 or 2001:db8::1", what, policy.Quote(text))}
	}
	if other.IsValid() && addr.Unmap().Is4() != other.Unmap().Is4() {
		return addr, usageError{fmt.Errorf("%s %s: is of another family than %s; write an address of the same", what, addr, other)}
	}
	return addr, nil
}

func (a *app) explain(c *cobra.Command, q diagnose.Question, pod string) error {
	node, err := a.inspect(c.Context())
	if err != nil {
		return err
	}
	pods, _, err := node.Dir.Pods()
	if err != nil {
		warn(a, []error{err})
	}
	if pod != "" {
		if q.Src, err = sourceOf(pod, pods, q.Dst.Unmap().Is4()); err != nil {
			return err
		}
	}
	q.Pod = diagnose.HolderOf(q.Src.Unmap(), pods)
	from := routeTo(q.Src)
	q.DstLocal, q.SrcLocal = routeTo(q.Dst).Type == unix.RTN_LOCAL, from.Type == unix.RTN_LOCAL
	q.Hops, q.RouteErr = nextHops(q.Packet, from.LinkIndex)
	q.ThirdParty = readThirdParty
	q.OutIndex = interfaceIndex
	r := node.DryRun(c.Context(), node.Read())
	if r.Rules == nil {
		warn(a, r.Warnings)
		return joined(r.Problems)
	}
	q.Incomplete = r.Incomplete()
	if !q.SrcLocal {
		q.NoHook = diagnose.NoHookPlugin(q.Src.Unmap(), pods, r.Sources.ConfDir)
	}
	e := diagnose.Explain(q, r.Rules, r.Stored, diagnose.OriginFinder{ConfDir: r.Sources.ConfDir, Since: node.Dir.Written})
	if a.json() {
		e.Reconciler = node.active
		return a.print(e)
	}
	node.printSettingsOrigin(a)
	e.Text(a.out)
	warn(a, r.Warnings)
	warn(a, mapped(node.problems(r, r.Obstacles()), func(p reconcile.Problem) error { return p.Err }))
	return nil
}

// readThirdParty reads the rules that explain judges packets by.
func readThirdParty(f policy.Family, owned func(thirdparty.Place) bool) (diagnose.Rules, error) {
	return thirdparty.ReadPostrouting(f, owned)
}

func interfaceIndex(name string) int {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return 0
	}
	return link.Index
}

// sourceOf returns the address of a pod in a family: of several pods with the name, that of the latest ADD.
func sourceOf(name string, pods []store.Pod, is4 bool) (source netip.Addr, err error) {
	var latest store.Pod
	for _, p := range pods {
		if p.Namespace+"/"+p.Name == name && p.At >= latest.At {
			latest = p
		}
	}
	var addresses []netip.Addr
	for _, p := range pods {
		if p.ContainerID == latest.ContainerID {
			addresses = append(addresses, p.Addresses...)
		}
	}
	addresses = slices.DeleteFunc(addresses, func(a netip.Addr) bool { return a.Is4() != is4 })
	switch {
	case latest.ContainerID == "":
		return source, fmt.Errorf("--pod %s: no pod of this name is on record; pods of the host network have none", policy.Quote(name))
	case len(addresses) == 0:
		return source, fmt.Errorf("--pod %s: the pod has no address of the family of DST on record", policy.Quote(name))
	case len(addresses) > 1:
		return source, fmt.Errorf("--pod %s: the pod has the addresses %v; state one with --from", policy.Quote(name), addresses)
	}
	return addresses[0], nil
}

// routeTo returns the route to an address, or the zero Route. That to an address of the node has the type
// RTN_LOCAL.
func routeTo(a netip.Addr) netlink.Route {
	if !a.IsValid() {
		return netlink.Route{}
	}
	routes, _ := netlink.RouteGet(a.Unmap().WithZone("").AsSlice())
	return append(routes, netlink.Route{})[0] // there may be no route, one that refuses, or no such family
}

// nextHops returns the interfaces that the packet leaves through by the routing table: several, where the
// route has as many next hops. The packet comes in by an interface, if the node does not send it.
func nextHops(packet policy.Packet, in int) ([]string, error) {
	dst, options := packet.Dst.Unmap().WithZone("").AsSlice(), &netlink.RouteGetOptions{FIBMatch: true}
	if packet.Src.IsValid() {
		if options.SrcAddr = packet.Src.Unmap().WithZone("").AsSlice(); !packet.SrcLocal {
			options.IifIndex = in
		}
	}
	routes, err := netlink.RouteGetWithOptions(dst, options)
	// What is no answer of the routing table: a source that the kernel takes for a wrong one, or forwarding
	// that is off.
	if refused := errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EHOSTUNREACH); refused && options.SrcAddr != nil {
		routes, err = netlink.RouteGetWithOptions(dst, &netlink.RouteGetOptions{FIBMatch: true})
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, route := range routes {
		links := mapped(route.MultiPath, func(hop *netlink.NexthopInfo) int { return hop.LinkIndex })
		if len(links) == 0 {
			links = []int{route.LinkIndex}
		}
		for _, index := range links {
			if link, err := netlink.LinkByIndex(index); err == nil && !slices.Contains(names, link.Attrs().Name) {
				names = append(names, link.Attrs().Name)
			}
		}
	}
	return names, nil
}

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

func connectionQuery(source, protocol, to string, given func(flag string) bool) (q conntrack.Query, err error) {
	from, err := netip.ParseAddrPort(source)
	if err != nil {
		return q, usageError{fmt.Errorf("ADDRESS:PORT: %s is not an address and a port; write 203.0.113.1:40001 or [2001:db8::1]:40001", policy.Quote(source))}
	}
	q.Source = netip.AddrPortFrom(from.Addr().Unmap().WithZone(""), from.Port())
	if given("protocol") {
		if q.Protocol = protocols()[protocol]; q.Protocol == 0 {
			return q, usageError{fmt.Errorf("--protocol %q: write tcp, udp or sctp", protocol)}
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
	Protocol        string        `json:"protocol"`
	Source          netip.Addr    `json:"source"`
	SourcePort      uint16        `json:"sourcePort"`
	Destination     netip.Addr    `json:"destination"`
	DestinationPort uint16        `json:"destinationPort"`
	Endpoint        netip.Addr    `json:"endpoint"` // that packets reach: the destination, or what a Service chose
	EndpointPort    uint16        `json:"endpointPort"`
	SourceLocal     bool          `json:"sourceLocal"` // the node itself sends them
	Translated      bool          `json:"translated"`  // the source address or port
	Zone            uint16        `json:"zone"`        // of conntrack
	Pod             *diagnose.Pod `json:"pod"`         // that holds the source; null if none is known
	Chain           *string       `json:"chain"`       // whose policy decides now; null where none has it in scope
	Verdict         policy.Action `json:"verdict"`
}

// connectionOf has the decision of the first chain that masquerades, else of one that exempts.
func connectionOf(f conntrack.Found, policies []policy.Policy) connection {
	src, dst, endpoint := f.Original.Src, f.Original.Dst, f.Reply.Src
	c := connection{
		Source: src.Addr(), SourcePort: src.Port(),
		Destination: dst.Addr(), DestinationPort: dst.Port(), Endpoint: endpoint.Addr(), EndpointPort: endpoint.Port(),
		SourceLocal: f.SourceLocal, Translated: src != f.Reply.Dst, Zone: f.Zone, Verdict: policy.ActionOutOfScope,
	}
	for name, number := range protocols() {
		if number == f.Original.Protocol {
			c.Protocol = name
		}
	}
	packet := policy.Packet{Src: src.Addr(), Dst: endpoint.Addr(), Out: f.Interface, SrcLocal: f.SourceLocal, DstLocal: f.EndpointLocal}
	for _, p := range policies {
		action := p.Decide(packet).Action
		if action == policy.ActionMasquerade && c.Verdict != action || action == policy.ActionExempt && c.Chain == nil {
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
	e := node.Enforcer(node.Read(), func(error) {})
	state, err := e.Dir.Load()
	pods, _, podsErr := node.Dir.Pods()
	if err = cmp.Or(err, podsErr); err != nil {
		warn(a, []error{err})
	}
	policies := e.Policies(state)
	connections := mapped(found, func(f conntrack.Found) connection {
		c := connectionOf(f, policies)
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
	for _, f := range state.Unreadable { // the chain may be another
		warn(a, []error{f.Err})
	}
	if len(found) == 0 && err == nil {
		err = fmt.Errorf("no connection leaves with %s now; conntrack does not know connections that have ended\n"+
			"  To find them later, log them beforehand: conntrack -E -e DESTROY -o timestamp", q.Source)
	}
	return err
}

func (c connection) text(w io.Writer) {
	to := netip.AddrPortFrom(c.Destination, c.DestinationPort).String()
	if endpoint := netip.AddrPortFrom(c.Endpoint, c.EndpointPort).String(); endpoint != to {
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
	text := "none has it in scope, keeps its source address"
	if c.Chain != nil {
		text = *c.Chain + map[policy.Action]string{policy.ActionMasquerade: ", masqueraded", policy.ActionExempt: ", exempt, keeps its source address"}[c.Verdict]
	}
	// The node may masquerade with the address that it has.
	if masquerades := c.Verdict == policy.ActionMasquerade; c.Translated != masquerades && (!masquerades || !c.SourceLocal) {
		is := "is not translated"
		if c.Translated {
			is = "is translated"
		}
		text += "; this connection " + is + ": it may be older than the policy, or another program decided"
	}
	return text
}
