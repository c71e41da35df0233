// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func (a *app) explainCommand() *cobra.Command {
	var from, pod, out string
	c := &cobra.Command{
		Use:   "explain DST",
		Short: "Show the verdict for traffic to an address, and its origin",
		Args:  oneArgument("address, such as 10.1.2.3"),
		RunE: func(c *cobra.Command, args []string) error {
			q, err := question(args[0], from, pod, out, c.Flags().Changed)
			if err != nil {
				return err
			}
			return a.explain(c, q, pod)
		},
	}
	c.Flags().StringVar(&from, "from", "", "source `ADDRESS` (default: any in scope)")
	c.Flags().StringVar(&pod, "pod", "", "source pod, as `NAMESPACE/NAME`")
	c.Flags().StringVar(&out, "out", "", "output `INTERFACE` (default: that of the route, or any in scope)")
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
	q.Trace = func(t thirdparty.Traffic, owned func(thirdparty.Place) (bool, bool)) ([]thirdparty.Hit, error) {
		return thirdparty.Trace(c.Context(), t, owned)
	}
	r := node.DryRun(c.Context(), node.Read())
	if r.Rules == nil {
		warn(a, r.Warnings)
		return joined(r.Problems)
	}
	q.Incomplete = r.Incomplete()
	e := diagnose.Explain(q, r.Rules, r.Stored, diagnose.OriginFinder{
		ConfDir: r.Sources.ConfDir, Since: node.Dir.Written, Now: time.Now(),
	})
	if a.json() {
		e.Reconciler = node.active
		return a.print(e)
	}
	node.printSettingsOrigin(a)
	e.Text(a.out)
	warn(a, r.Warnings)
	for _, p := range node.problems(r, r.Obstacles()) {
		// The explanation has why its chain is not as the policy says, and why documents cannot be read.
		ofChain := p.Chain != "" && p.Chain == e.Chain && p.Reason != reconcile.ReasonConflict
		if e.Problem == "" || !ofChain && (q.Incomplete == nil || p.Reason != reconcile.ReasonState) {
			warn(a, []error{p.Err})
		}
	}
	return nil
}

// sourceOf returns the address of a pod in a family. Of several pods with the name, it is that of the latest ADD.
func sourceOf(name string, pods []store.Pod, is4 bool) (source netip.Addr, err error) {
	var container string
	var latest int64
	for _, p := range pods {
		if p.Namespace+"/"+p.Name == name && p.At >= latest {
			container, latest = p.ContainerID, p.At
		}
	}
	var addresses []netip.Addr
	for _, p := range pods {
		for _, a := range p.Addresses {
			if p.ContainerID == container && a.Is4() == is4 {
				addresses = append(addresses, a)
			}
		}
	}
	switch {
	case container == "":
		return source, fmt.Errorf("--pod %s: no pod of this name is on record; pods of the host network have none", policy.Quote(name))
	case len(addresses) == 0:
		return source, fmt.Errorf("--pod %s: the pod has no address of the family of DST on record", policy.Quote(name))
	case len(addresses) > 1:
		return source, fmt.Errorf("--pod %s: the pod has the addresses %v; state one with --from", policy.Quote(name), addresses)
	}
	return addresses[0], nil
}

// routeTo returns the route to an address, as `ip route get` shows it. The type of the node's own addresses is RTN_LOCAL.
// It is the zero Route without an address or a route.
func routeTo(a netip.Addr) netlink.Route {
	if !a.IsValid() {
		return netlink.Route{}
	}
	routes, _ := netlink.RouteGet(a.Unmap().WithZone("").AsSlice())
	return append(routes, netlink.Route{})[0] // there may be no route, one that refuses, or no such family
}

// nextHops returns the interfaces that the packet leaves through by the routing table: several, where the route has as
// many next hops. The packet comes in by an interface, if the node does not send it.
func nextHops(packet policy.Packet, in int) ([]string, error) {
	dst, options := packet.Dst.Unmap().WithZone("").AsSlice(), &netlink.RouteGetOptions{FIBMatch: true}
	if packet.Src.IsValid() {
		if options.SrcAddr = packet.Src.Unmap().WithZone("").AsSlice(); !packet.SrcLocal {
			options.IifIndex = in
		}
	}
	routes, err := netlink.RouteGetWithOptions(dst, options)
	// What is no answer of the routing table: a source that the kernel takes for a wrong one, or forwarding that is off.
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
