// SPDX-License-Identifier: Apache-2.0

package topology_test

import (
	"encoding/json"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

const conflist = `{
  "cniVersion": "1.1.0",
  "name": "pods",
  "plugins": [{
    "type": "bridge",
    "bridge": "cni0",
    "isGateway": true,
    "ipam": {
      "type": "host-local",
      "ranges": [[{"subnet": "10.22.0.0/24"}], [{"subnet": "fd22::/64"}]],
      "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
    }
  }]
}`

func TestCNI(t *testing.T) {
	w := topology.New(t, topology.Options{})
	pod := topology.Must(w.NewPod("pod"))(t)
	cni := topology.Must(topology.NewCNI(w.Node, filepath.Join(t.TempDir(), "net.d")))(t)
	if err := cni.Write("10-pods.conflist", conflist); err != nil {
		t.Fatal(err)
	}
	expect := func(result topology.Result, err error) topology.Result {
		t.Helper()
		if err != nil || result.ExitCode != 0 {
			t.Fatalf("got %+v, %v", result, err)
		}
		return result
	}
	expect(cni.Status(t.Context(), "pods"))
	added := expect(cni.Add(t.Context(), "pods", pod))
	var result struct {
		IPs []struct{ Address netip.Prefix }
	}
	if err := json.Unmarshal([]byte(added.Stdout), &result); err != nil || len(result.IPs) != 2 {
		t.Fatalf("got %v, %v from %s", result, err, added.Stdout)
	}
	for i, destination := range []string{"192.168.1.1", "2001:db8::1"} {
		udp := topology.Must(pod.SendUDP(echo(destination)))(t)
		tcp := topology.Must(pod.SendTCP(echo(destination)))(t)
		want := result.IPs[i].Address.Addr()
		if udp.Source.Addr() != want || tcp.Source.Addr() != want || !udp.Answered {
			t.Errorf("to %s: seen %v and %v, want %s", destination, udp, tcp, want)
		}
	}
	expect(cni.Check(t.Context(), "pods", pod))
	expect(cni.GC(t.Context(), "pods"))
	expect(cni.Del(t.Context(), "pods", pod))
	if _, err := pod.SendUDP(echo("192.168.1.1")); err == nil {
		t.Error("the pod has a network after DEL")
	}
}
