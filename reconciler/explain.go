// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func (a *app) explainCommand() *cobra.Command {
	var flags explainFlags
	c := &cobra.Command{
		Use:   "explain DST",
		Short: "Show the verdict for traffic to an address, and its origin",
		Args:  cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			flags.given = c.Flags().Changed
			q, err := flags.question(args[0])
			if err != nil {
				return err
			}
			return a.explain(c, q, flags.pod)
		},
	}
	c.Flags().StringVar(&flags.from, "from", "", "source `ADDRESS` (default: any in scope)")
	c.Flags().StringVar(&flags.pod, "pod", "", "source pod, as `NAMESPACE/NAME`")
	c.Flags().StringVar(&flags.out, "out", "",
		"output `INTERFACE` (default: that of the route, or any in scope)")
	c.Flags().StringVar(&flags.mark, "mark", "", "packet `MARK` that third-party rules see (default: none)")
	return c
}

// explainFlags are the flags of explain.
type explainFlags struct {
	from, pod, out, mark string
	given                func(flag string) bool
}

// question reads the arguments. An empty flag is most likely a shell variable that is not set.
func (f *explainFlags) question(dst string) (q diagnose.Question, err error) {
	q.Dst, err = address("DST", dst, netip.Addr{})
	if err == nil && f.given("from") {
		q.Src, err = address("--from", f.from, q.Dst)
	}
	if err != nil {
		return q, err
	}
	q.Out = f.out
	quote := policy.Quote
	namespace, name, _ := strings.Cut(f.pod, "/")
	isName := policy.ValidateInterface(f.out) == nil && !strings.HasSuffix(f.out, "+")
	switch {
	case f.given("pod") && f.given("from"):
		return q, usageError{errors.New("--pod and --from both state the source; leave one out")}
	case f.given("pod") && (namespace == "" || name == ""):
		return q, usagef("--pod %s: write NAMESPACE/NAME, such as default/web-0", quote(f.pod))
	case f.given("out") && f.out == "":
		return q, usagef("--out: is empty; write the name of an interface, or leave the flag out")
	case f.given("out") && !isName:
		return q, usagef("--out %s: is not the name of an interface; write one such as eth0", quote(f.out))
	case f.given("mark"):
		q.Mark, err = policy.ParseMark(f.mark)
		if err != nil {
			return q, usagef("--mark %s: is not a 32-bit number; write one such as 0x4000", quote(f.mark))
		}
	}
	return q, nil
}

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// address parses an address of the family of another one, if that is valid.
func address(what, text string, other netip.Addr) (netip.Addr, error) {
	addr, err := netip.ParseAddr(text)
	if err != nil {
		text = policy.Quote(text)
		return addr, usagef("%s: %s is not an address; write one such as 10.1.2.3 or 2001:db8::1", what, text)
	}
	if other.IsValid() && addr.Unmap().Is4() != other.Unmap().Is4() {
		const form = "%s %s: is of another family than %s; write an address of the same"
		return addr, usagef(form, what, addr, other)
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
		q.Src, err = sourceOf(pod, pods, q.Dst.Unmap().Is4())
		if err != nil {
			return err
		}
	}
	q.Pod = diagnose.HolderOf(q.Src.Unmap(), pods)
	from := routeTo(q.Src)
	q.SrcLocal = from.Type == unix.RTN_LOCAL
	q.DstLocal = routeTo(q.Dst).Type == unix.RTN_LOCAL
	q.Hops, q.RouteErr = nextHops(q.Packet, from.LinkIndex, uint32(q.Mark))
	q.ThirdParty, q.BeforeConntrack = readThirdParty, readBeforeConntrack
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
	finder := diagnose.OriginFinder{ConfDir: r.Sources.ConfDir, Since: node.Dir.Written}
	e := diagnose.Explain(q, r.Rules, r.InForce, finder)
	if a.json() {
		e.Reconciler = node.active
		return a.print(e)
	}
	node.printSettingsOrigin(a)
	e.Text(a.out)
	warn(a, r.Warnings)
	warn(a, mapped(node.problems(r, r.Obstacles()), errOf))
	return nil
}

// readThirdParty reads the rules that explain judges packets by.
func readThirdParty(f policy.Family, owned func(thirdparty.Place) bool) (diagnose.Rules, error) {
	return thirdparty.ReadPostrouting(f, owned)
}

func readBeforeConntrack(f policy.Family) (diagnose.Rules, error) {
	return thirdparty.ReadBeforeConntrack(f)
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
	isFound := false
	for _, p := range pods {
		if p.Namespace+"/"+p.Name != name {
			continue
		}
		if !isFound || p.At >= latest.At { // which may be negative
			latest, isFound = p, true
		}
	}
	var addresses []netip.Addr
	for _, p := range pods {
		if p.ContainerID != latest.ContainerID {
			continue
		}
		for _, a := range p.Addresses {
			if a.Is4() == is4 {
				addresses = append(addresses, a)
			}
		}
	}
	name = policy.Quote(name)
	switch {
	case !isFound:
		err = fmt.Errorf("--pod %s: no pod of this name is on record; "+
			"pods of the host network have none", name)
	case len(addresses) == 0:
		err = fmt.Errorf("--pod %s: the pod has no address of the family of DST on record", name)
	case len(addresses) > 1:
		err = fmt.Errorf("--pod %s: the pod has the addresses %v; state one with --from", name, addresses)
	default:
		source = addresses[0]
	}
	return source, err
}

// routeTo returns the route to an address, or the zero Route. That to an address of the node has the type
// RTN_LOCAL.
func routeTo(a netip.Addr) netlink.Route {
	if !a.IsValid() {
		return netlink.Route{}
	}
	routes, _ := netlink.RouteGet(a.Unmap().WithZone("").AsSlice())
	if len(routes) == 0 { // there is none, or one that refuses, or no such family
		return netlink.Route{}
	}
	return routes[0]
}

// nextHops returns the interfaces that the packet leaves through by the routing table: several, where the
// route has as many next hops. The packet comes in by an interface, if the node does not send it.
func nextHops(packet policy.Packet, in int, mark uint32) ([]string, error) {
	dst := packet.Dst.Unmap().WithZone("").AsSlice()
	options := &netlink.RouteGetOptions{FIBMatch: true, Mark: mark}
	if packet.Src.IsValid() {
		options.SrcAddr = packet.Src.Unmap().WithZone("").AsSlice()
		if !packet.SrcLocal {
			options.IifIndex = in
		}
	}
	routes, err := netlink.RouteGetWithOptions(dst, options)
	// What is no answer of the routing table: a source that the kernel takes for a wrong one, or forwarding
	// that is off.
	isWrong := errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EXDEV)
	isRefused := isWrong || errors.Is(err, unix.EHOSTUNREACH)
	if isRefused && options.SrcAddr != nil {
		routes, err = netlink.RouteGetWithOptions(dst, &netlink.RouteGetOptions{FIBMatch: true, Mark: mark})
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, route := range routes {
		for _, index := range linksOf(route) {
			link, err := netlink.LinkByIndex(index)
			if err == nil && !slices.Contains(names, link.Attrs().Name) {
				names = append(names, link.Attrs().Name)
			}
		}
	}
	return names, nil
}

// linksOf returns the numbers of the interfaces of a route's next hops.
func linksOf(route netlink.Route) []int {
	if len(route.MultiPath) == 0 {
		return []int{route.LinkIndex}
	}
	var links []int
	for _, hop := range route.MultiPath {
		links = append(links, hop.LinkIndex)
	}
	return links
}
