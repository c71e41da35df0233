// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

// TestReadAndListen: what the kernel says of addresses, and that it announces each change.
func TestReadAndListen(t *testing.T) {
	sandbox.NetworkNamespace(t)
	changed := make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	namespace := assert.Must(netns.Get())(t)
	go func() {
		runtime.LockOSThread() // for good, as that of the test
		if err := netns.Set(namespace); err != nil {
			ended <- err
		}
		ended <- nfnetlink.ListenAddresses(ctx, policy.ServiceInterface, func() { changed <- struct{}{} })
	}()
	awaitChange := func() {
		t.Helper()
		select {
		case <-changed:
		case <-time.After(timelimit.Wait):
			t.Fatal("no event")
		}
		time.Sleep(10 * time.Millisecond)
		for len(changed) > 0 {
			<-changed
		}
	}
	awaitChange() // the first one, without a change

	lo := assert.Must(netlink.LinkByName("lo"))(t)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
	must(t, netlink.LinkAdd(bridge))
	must(t, netlink.LinkSetUp(bridge))
	down := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br1"}}
	must(t, netlink.LinkAdd(down))
	add := func(link netlink.Link, address string, edit ...func(*netlink.Addr)) {
		t.Helper()
		a := assert.Must(netlink.ParseAddr(address))(t)
		if a.IP.To4() == nil {
			a.Flags = unix.IFA_F_NODAD
		}
		for _, e := range edit {
			e(a)
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			t.Fatalf("add %s: %v", address, err)
		}
		awaitChange()
	}
	add(lo, "192.0.2.1/32")
	add(bridge, "192.0.2.2/24")
	add(bridge, "192.0.2.3/24")
	add(bridge, "198.51.100.4/24", func(a *netlink.Addr) { a.Scope = unix.RT_SCOPE_LINK })
	add(bridge, "192.0.2.5/32", func(a *netlink.Addr) { a.Peer = &net.IPNet{IP: net.IPv4(192, 0, 2, 99), Mask: net.CIDRMask(32, 32)} })
	add(down, "192.0.2.6/24")
	add(bridge, "2001:db8::1/64")
	add(bridge, "2001:db8::2/64", func(a *netlink.Addr) { a.ValidLft, a.PreferedLft = 3600, 0 })
	add(bridge, "2001:db8::3/64", func(a *netlink.Addr) { a.Flags = 0 }) // duplicate address detection begins
	got := assert.Must(Read(policy.Families()))(t)
	address := func(text, name string) policy.NodeAddress {
		return policy.NodeAddress{Address: netip.MustParseAddr(text), Interface: name, Up: true}
	}
	with := func(a policy.NodeAddress, edit func(*policy.NodeAddress)) policy.NodeAddress { edit(&a); return a }
	want := []policy.NodeAddress{
		with(address("192.0.2.1", "lo"), func(a *policy.NodeAddress) { a.Shared, a.Up = true, false }),
		address("192.0.2.2", "br0"),
		address("192.0.2.5", "br0"),
		with(address("192.0.2.3", "br0"), func(a *policy.NodeAddress) { a.Secondary = true }),
		with(address("192.0.2.6", "br1"), func(a *policy.NodeAddress) { a.Up = false }),
		with(address("2001:db8::3", "br0"), func(a *policy.NodeAddress) { a.Unusable = true }),
		with(address("2001:db8::2", "br0"), func(a *policy.NodeAddress) { a.Deprecated = true }),
		address("2001:db8::1", "br0"),
	}
	byAddress := cmpopts.SortSlices(func(a, b policy.NodeAddress) bool { return a.Address.Less(b.Address) })
	assert.Equal(t, "got", got, want, byAddress)
	const path, manageTemporary = "/proc/sys/net/ipv6/conf/br0/use_tempaddr", 0x100
	must(t, os.WriteFile(path, []byte("2"), 0o600))
	add(bridge, "2001:db8:7::1/64", func(a *netlink.Addr) {
		a.Flags, a.ValidLft, a.PreferedLft = manageTemporary|unix.IFA_F_NODAD, 7200, 3600
	})
	var temporary []policy.NodeAddress
	if !timelimit.Await(timelimit.Wait, func() bool {
		got := assert.Must(Read(policy.Families()))(t)
		temporary = slices.DeleteFunc(got, func(a policy.NodeAddress) bool {
			return !netip.MustParsePrefix("2001:db8:7::/64").Contains(a.Address) || a.Address == netip.MustParseAddr("2001:db8:7::1")
		})
		return len(temporary) == 1 && temporary[0].Unusable
	}) {
		t.Fatalf("temporary addresses %v", temporary)
	}
	must(t, netlink.LinkSetUp(lo))
	awaitChange()
	services := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: policy.ServiceInterface}}
	must(t, netlink.LinkAdd(services))
	awaitChange()
	for range 20 {
		must(t, netlink.AddrAdd(services, &netlink.Addr{IPNet: netlink.NewIPNet(net.IPv4(10, 96, 0, 1))}))
		must(t, netlink.AddrDel(services, &netlink.Addr{IPNet: netlink.NewIPNet(net.IPv4(10, 96, 0, 1))}))
	}
	time.Sleep(50 * time.Millisecond)
	if n := len(changed); n > 0 {
		t.Errorf("%d events of addresses of Services", n)
	}
	add(bridge, "192.0.2.77/24")
	must(t, netlink.LinkDel(services))
	awaitChange()
	cancel()
	if err := <-ended; ctx.Err() == nil || err == nil {
		t.Errorf("Listen ended: %v", err)
	}
}

// TestReadBesideServices: kube-proxy in mode ipvs adds and removes addresses all the time.
func TestReadBesideServices(t *testing.T) {
	sandbox.NetworkNamespace(t)
	services := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: policy.ServiceInterface}}
	node := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}}
	must(t, netlink.LinkAdd(services))
	must(t, netlink.LinkAdd(node))
	must(t, netlink.AddrAdd(node, &netlink.Addr{IPNet: netlink.NewIPNet(net.IPv4(192, 0, 2, 1))}))
	service := func(i int) *netlink.Addr {
		return &netlink.Addr{IPNet: netlink.NewIPNet(net.IPv4(10, 96, byte(i>>8), byte(i)))}
	}
	const number = 4000
	for i := range number {
		must(t, netlink.AddrAdd(services, service(i)))
	}
	handle := assert.Must(netlink.NewHandle())(t)
	defer handle.Close()
	stop, stopped := make(chan struct{}), make(chan error)
	go func() {
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			if err := errors.Join(handle.AddrAdd(services, service(number)), handle.AddrDel(services, service(number))); err != nil {
				stopped <- err
				return
			}
		}
	}()
	for range 100 {
		got, err := Read([]policy.Family{policy.IPv4})
		if err != nil || len(got) != 1 || got[0].Interface != "eth0" {
			t.Errorf("got %d addresses, %v", len(got), err)
			break
		}
	}
	close(stop)
	must(t, <-stopped)
}

func TestShared(t *testing.T) {
	for want, link := range map[bool]nfnetlink.Link{
		true: {Name: "d0", Flags: unix.IFF_UP, Kind: "dummy"}, false: {Name: "br0", Flags: unix.IFF_UP, Kind: "bridge"},
	} {
		if got := nodeAddress(nfnetlink.IPv4, nfnetlink.Address{}, link); got.Shared != want || !got.Up {
			t.Errorf("%+v: %+v", link, got)
		}
	}
}

var must = assert.NoError
