// Calls a DRA driver as a kubelet does: registration, prepare and unprepare.
//
// Usage: kubelet_client REGISTRATION_SOCKET
//
// Each line of the input is a call, {"id": 1, "call": "prepare", "claims": [{"namespace": ...,
// "uid": ..., "name": ...}]}, and each line of the output the answer to one, with its id. Calls run
// at the same time. The calls are "register", "prepare" and "unprepare".
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// As in the kubelet (pkg/kubelet/cm/dra).
const patience = 45 * time.Second

type call struct {
	ID     int          `json:"id"`
	Call   string       `json:"call"`
	Claims []*dra.Claim `json:"claims"`
}

type outcome struct {
	Error   string        `json:"error,omitempty"`
	Devices []*dra.Device `json:"devices,omitempty"`
}

type answer struct {
	ID       int                `json:"id"`
	Error    string             `json:"error,omitempty"`
	Endpoint string             `json:"endpoint,omitempty"`
	Versions []string           `json:"versions,omitempty"`
	Claims   map[string]outcome `json:"claims,omitempty"`
}

type kubelet struct {
	socket string
	mutex  sync.Mutex
	plugin *grpc.ClientConn
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: kubelet_client REGISTRATION_SOCKET")
		os.Exit(2)
	}
	one := &kubelet{socket: os.Args[1]}
	output, written := json.NewEncoder(os.Stdout), sync.Mutex{}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var asked call
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			fmt.Fprintf(os.Stderr, "not a call: %s: %v\n", lines.Text(), err)
			os.Exit(2)
		}
		go func() {
			told := one.handle(asked)
			written.Lock()
			defer written.Unlock()
			if output.Encode(told) != nil {
				os.Exit(1)
			}
		}()
	}
}

func (one *kubelet) handle(asked call) answer {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	told := answer{ID: asked.ID}
	var err error
	switch asked.Call {
	case "register":
		err = one.register(ctx, &told)
	case "prepare":
		err = one.prepare(ctx, asked.Claims, &told)
	case "unprepare":
		err = one.unprepare(ctx, asked.Claims, &told)
	default:
		err = fmt.Errorf("unknown call %q", asked.Call)
	}
	if err != nil {
		told.Error = err.Error()
	}
	return told
}

func connect(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// register asks a plugin who it is and tells it that it is registered.
func (one *kubelet) register(ctx context.Context, told *answer) error {
	registrar, err := connect(one.socket)
	if err != nil {
		return err
	}
	defer registrar.Close()
	client := registration.NewRegistrationClient(registrar)
	info, err := client.GetInfo(ctx, &registration.InfoRequest{})
	if err != nil {
		return err
	}
	told.Endpoint, told.Versions = info.Endpoint, info.SupportedVersions
	plugin, err := connect(info.Endpoint)
	if err != nil {
		return err
	}
	one.mutex.Lock()
	if one.plugin != nil {
		one.plugin.Close()
	}
	one.plugin = plugin
	one.mutex.Unlock()
	status := &registration.RegistrationStatus{PluginRegistered: true}
	_, err = client.NotifyRegistrationStatus(ctx, status)
	return err
}

func (one *kubelet) client() (dra.DRAPluginClient, error) {
	one.mutex.Lock()
	defer one.mutex.Unlock()
	if one.plugin == nil {
		return nil, fmt.Errorf("no plugin is registered")
	}
	return dra.NewDRAPluginClient(one.plugin), nil
}

func (one *kubelet) prepare(ctx context.Context, claims []*dra.Claim, told *answer) error {
	client, err := one.client()
	if err != nil {
		return err
	}
	response, err := client.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		return err
	}
	told.Claims = map[string]outcome{}
	for uid, claim := range response.Claims {
		told.Claims[uid] = outcome{Error: claim.Error, Devices: claim.Devices}
	}
	return nil
}

func (one *kubelet) unprepare(ctx context.Context, claims []*dra.Claim, told *answer) error {
	client, err := one.client()
	if err != nil {
		return err
	}
	request := &dra.NodeUnprepareResourcesRequest{Claims: claims}
	response, err := client.NodeUnprepareResources(ctx, request)
	if err != nil {
		return err
	}
	told.Claims = map[string]outcome{}
	for uid, claim := range response.Claims {
		told.Claims[uid] = outcome{Error: claim.Error}
	}
	return nil
}
